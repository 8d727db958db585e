// One thread that works on a point alone: all of a CPU's, and a GPU's where there are points enough.
#pragma once

#include "nearest.h"

namespace pointproj {

struct OneLane {
  static constexpr int width = 1;
  static constexpr int kMostAtOnce = kReadAhead;  // candidates between two calls of meet's `then`
  static constexpr bool has_item = true;

  POINTPROJ_FN int lane() const { return 0; }
  POINTPROJ_FN bool anywhere(bool flag) const { return flag; }
  POINTPROJ_FN unsigned ballot(bool flag) const { return flag ? 1u : 0u; }
  POINTPROJ_FN int lowest_bit(unsigned) const { return 0; }
  POINTPROJ_FN int bit_count(unsigned bits) const { return static_cast<int>(bits); }
  POINTPROJ_FN int bits_before(unsigned) const { return 0; }
  POINTPROJ_FN void sync() const {}
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
  static constexpr int kPatience = 256, kPointsAsARow = 8;
  int rows_left = kNoRow;  // of cells that it is willing to visit
  POINTPROJ_FN void begin_patience() { rows_left = kPatience; }
  POINTPROJ_FN bool has_patience(int points) {
    rows_left -= 1 + points / kPointsAsARow;
    return rows_left >= 0;
  }
  POINTPROJ_FN int fetch_add(int* to, int value) const { return atomicAdd(to, value); }

  template <class Real, class Limit, class Body, class Then>
  POINTPROJ_FN void meet(
      const Points<Real>& points, const Vec3<Real>& q, int begin, int count, Limit limit, Body body, Then) const {
    for (int at = begin; at < begin + count; ++at) {
      const Point<Real> point = points.load(at);
      const Real squared = squared_distance(q, point.position);
      if (squared <= limit()) body(at, point, squared, true);
    }
  }
#else
  void begin_patience() const {}
  bool has_patience(int) const { return true; }
  int fetch_add(int* to, int value) const { return __atomic_fetch_add(to, value, __ATOMIC_RELAXED); }

  // Distances of several candidates at a time; most of the time few of them are near enough.
  template <class Real, class Limit, class Body, class Then>
  void meet(const Points<Real>& points, const Vec3<Real>& q, int begin, int count, Limit limit, Body body,
            Then then) const {
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
      then();
    }
  }

  alignas(16) double waiting[2 * kMostWaiting];
  template <class Sum>
  Neighbor<Sum>* list() {
    return reinterpret_cast<Neighbor<Sum>*>(waiting);
  }

  // Sums up in the row of the result itself, which stays in the cache; several rows at a time.
  template <class Sum, int kVector>
  struct RowSum {
    static constexpr int kAtOnce = 4;
    const Sum* values;
    int64_t stride;
    int channels;
    Sum* row;

    void begin(const Sum* values_, int stride_, int channels_, int, Sum* row_) {
      values = values_;
      stride = stride_;
      channels = channels_;
      row = row_;
      for (int c = 0; c < channels; ++c) row[c] = Sum(0);
    }
    void add(const Neighbor<Sum>* list, int size) {
      int at = 0;
      Sum* __restrict__ to = row;
      for (; at + kAtOnce <= size; at += kAtOnce) {
        const Neighbor<Sum>* four = list + at;
        const Sum *__restrict__ a = values + four[0].at * stride, *__restrict__ b = values + four[1].at * stride,
                  *__restrict__ c = values + four[2].at * stride, *__restrict__ d = values + four[3].at * stride;
        const Sum u = four[0].number, v = four[1].number, w = four[2].number, x = four[3].number;
        for (int i = 0; i < channels; ++i) {
          to[i] =
              multiply_add(u, a[i], multiply_add(v, b[i], multiply_add(w, c[i], multiply_add(x, d[i], to[i]))));
        }
      }
      for (; at < size; ++at) {
        const Sum* __restrict__ from = values + list[at].at * stride;
        for (int i = 0; i < channels; ++i) to[i] = multiply_add(list[at].number, from[i], to[i]);
      }
    }
    void scale(Sum factor) {
      for (int c = 0; c < channels; ++c) row[c] *= factor;
    }
    void finish(OneLane&, Sum factor) { scale(factor); }
  };
#endif
};

}  // namespace pointproj
