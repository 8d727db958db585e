// One thread that works on a point alone: all of a CPU's, and a GPU's where there are points enough.
#pragma once

#include "nearest.h"

namespace pointproj {

struct OneLane {
  static constexpr int width = 1;

  POINTPROJ_FN int lane() const { return 0; }
  POINTPROJ_FN bool anywhere(bool flag) const { return flag; }
  POINTPROJ_FN unsigned ballot(bool flag) const { return flag ? 1u : 0u; }
  POINTPROJ_FN int lowest_bit(unsigned) const { return 0; }
  template <class T>
  POINTPROJ_FN T take(T x, int) const {
    return x;
  }
  template <class T>
  POINTPROJ_FN T minimum(T x) const {
    return x;
  }
  template <class T>
  POINTPROJ_FN T sum(T x) const {
    return x;
  }
  template <class List, class Real>
  POINTPROJ_FN void insert(List& list, Real squared, int row, bool exists) const {
    if (exists) list.insert(squared, row);
  }

#if defined(__CUDACC__)
  POINTPROJ_FN int fetch_add(int* to, int value) const { return atomicAdd(to, value); }

  template <class Real, class Limit, class Body>
  POINTPROJ_FN void meet(
      const Points<Real>& points, const Vec3<Real>& q, int begin, int count, Limit limit, Body body) const {
    for (int at = begin; at < begin + count; ++at) {
      const Point<Real> point = points.load(at);
      const Real squared = squared_distance(q, point.position);
      if (squared <= limit()) body(at, point, squared, true);
    }
  }
#else
  int fetch_add(int* to, int value) const { return __atomic_fetch_add(to, value, __ATOMIC_RELAXED); }

  // Distances of several candidates at a time; most of the time few of them are near enough.
  template <class Real, class Limit, class Body>
  void meet(const Points<Real>& points, const Vec3<Real>& q, int begin, int count, Limit limit, Body body) const {
    for (int first = 0; first < count; first += kReadAhead) {
      const Real* x = points.data + begin + first;
      const Real* y = x + points.stride;
      const Real* z = y + points.stride;
      const Real bound = limit();
      Real squared[kReadAhead];
      int near = 0;
      for (int i = 0; i < kReadAhead; ++i) {
        const Real dx = q[0] - x[i], dy = q[1] - y[i], dz = q[2] - z[i];
        squared[i] = (dx * dx + dy * dy) + dz * dz;
        near += squared[i] <= bound ? 1 : 0;
      }
      if (near == 0) continue;
      const int size = lesser(count - first, kReadAhead);
      int hits[kReadAhead], found = 0;
      for (int i = 0; i < size; ++i) {  // without a branch that nobody can predict
        hits[found] = i;
        found += squared[i] <= bound ? 1 : 0;
      }
      for (int hit = 0; hit < found; ++hit) {
        const int at = begin + first + hits[hit];
        body(at, points.load(at), squared[hits[hit]], true);
      }
    }
  }

  // Neighbours are taken as they come.
  template <class Sum>
  struct Queue {
    explicit Queue(OneLane&) {}
    template <class Body>
    void push(OneLane&, bool hit, int at, Sum far, Body& body) {
      if (hit) body(at, far, true);
    }
    template <class Body>
    void drain(OneLane&, Body&) {}
  };

  // Sums up in the row of the result itself, which stays in the cache; several rows at a time.
  template <class Sum, int kVector>
  struct RowSum {
    static constexpr int kAtOnce = 4;
    const Sum* values;
    int64_t stride;
    int channels;
    Sum* row;
    const Sum* rows[kAtOnce];
    Sum weights[kAtOnce];
    int waiting;

    void begin(const Sum* values_, int stride_, int channels_, int, Sum* row_) {
      values = values_;
      stride = stride_;
      channels = channels_;
      row = row_;
      waiting = 0;
      for (int c = 0; c < channels; ++c) row[c] = Sum(0);
    }
    void add(OneLane&, int at, Sum weight, bool exists) {
      if (!exists) return;
      rows[waiting] = values + at * stride;
      weights[waiting] = weight;
      if (++waiting < kAtOnce) return;
      const Sum *__restrict__ a = rows[0], *__restrict__ b = rows[1], *__restrict__ c = rows[2],
                *__restrict__ d = rows[3];
      const Sum u = weights[0], v = weights[1], w = weights[2], x = weights[3];
      Sum* __restrict__ to = row;
      for (int i = 0; i < channels; ++i) {
        to[i] = multiply_add(u, a[i], multiply_add(v, b[i], multiply_add(w, c[i], multiply_add(x, d[i], to[i]))));
      }
      waiting = 0;
    }
    void scale(Sum factor) {
      for (int i = 0; i < waiting; ++i) weights[i] *= factor;
      for (int c = 0; c < channels; ++c) row[c] *= factor;
    }
    void finish(OneLane&, Sum factor) {
      for (int i = 0; i < waiting; ++i) {
        for (int c = 0; c < channels; ++c) row[c] = multiply_add(weights[i], rows[i][c], row[c]);
      }
      waiting = 0;
      scale(factor);
    }
  };
#endif
};

}  // namespace pointproj
