// One thread for each point: on a CPU always, on a GPU where there are many points.
//
// visit() shows a visitor the points of a run: process(lanes, at, point, squared distance, exists) with one point in
// each lane, and flush(lanes) after at most kMostAtOnce points. Points farther than limit() may be left out. One thread
// and a whole warp return how many points they have, and visit none of more than `most`.
#pragma once

#include "queue.h"

namespace pointproj::POINTPROJ_DEVICE {

struct OneLane {
  static constexpr int width = 1;
  static constexpr int kMostAtOnce = kReadAhead;  // points between two calls of flush
  static constexpr bool has_item = true;

  POINTPROJ_FN int lane() const { return 0; }
  POINTPROJ_FN bool any(bool flag) const { return flag; }
  POINTPROJ_FN unsigned ballot(bool flag) const { return flag ? 1u : 0u; }
  POINTPROJ_FN int lowest_bit(unsigned) const { return 0; }
  POINTPROJ_FN int bit_count(unsigned bits) const { return static_cast<int>(bits); }
  POINTPROJ_FN int bits_before(unsigned) const { return 0; }
  POINTPROJ_FN void sync() const {}
  template <class T>
  POINTPROJ_FN T broadcast(T x, int) const { return x; }
  template <class T>
  POINTPROJ_FN T minimum(T x) const { return x; }
  template <class T>
  POINTPROJ_FN T sum(T x) const { return x; }

#if defined(__CUDACC__)
  static constexpr int kBudget = 96, kPointsAsARow = 8;
  int budget = kNoRow;  // rows of cells that it may still visit
  POINTPROJ_FN void limit_budget() { budget = kBudget; }
  POINTPROJ_FN bool spend(int points) {
    budget -= 1 + points / kPointsAsARow;
    return budget >= 0;
  }
  POINTPROJ_FN int fetch_add(int* to, int value) const { return atomicAdd(to, value); }

  template <class Real, class Visitor>
  POINTPROJ_FN int visit(
      const SortedPoints<Real>& points, const Vec3<Real>& q, int begin, int count, Visitor& visitor,
      int most = kNoRow) const {
    if (count > most) return count;
    const int end = begin + count;
    Point<Real> next;
    if (begin < end) next = points.load(begin);
    for (int at = begin; at < end; ++at) {
      const Point<Real> point = next;
      if (at + 1 < end) next = points.load(at + 1);  // loaded while this one is processed
      const Real squared = squared_distance<Real>(q, point.position);
      if (squared <= visitor.limit()) visitor.process(*this, at, point, squared, true);
    }
    return count;
  }
#else
  void limit_budget() const {}
  bool spend(int) const { return true; }
  int fetch_add(int* to, int value) const { return __atomic_fetch_add(to, value, __ATOMIC_RELAXED); }

  // Distances of several candidates at a time; most of the time few of them are near enough.
  template <class Real, class Visitor>
  int visit(const SortedPoints<Real>& points, const Vec3<Real>& q, int begin, int count, Visitor& visitor,
            int most = kNoRow) {
    if (count > most) return count;
    for (int first = 0; first < count; first += kReadAhead) {
      const Real* x = points.data + begin + first;
      const Real* y = x + points.stride;
      const Real* z = y + points.stride;
      const Real limit = visitor.limit();
      Real squared[kReadAhead];
      int near = 0;
      for (int i = 0; i < kReadAhead; ++i) {
        const Real dx = q[0] - x[i], dy = q[1] - y[i], dz = q[2] - z[i];
        squared[i] = (dx * dx + dy * dy) + dz * dz;
        near += squared[i] <= limit ? 1 : 0;
      }
      if (near == 0) continue;
      const int size = lesser(count - first, kReadAhead);
      int hits[kReadAhead], found = 0;
      for (int i = 0; i < size; ++i) {  // no branch: it could not be predicted
        hits[found] = i;
        found += squared[i] <= limit ? 1 : 0;
      }
      for (int hit = 0; hit < found; ++hit) {
        const int at = begin + first + hits[hit];
        visitor.process(*this, at, points.load(at), squared[hits[hit]], true);
      }
      visitor.flush(*this);
    }
    return count;
  }

  alignas(16) double storage[2 * kQueueLength];
  template <class Sum>
  Neighbor<Sum>* reserve() { return reinterpret_cast<Neighbor<Sum>*>(storage); }

  // Adds to the row of the result itself, which stays in the cache, several rows at a time. read() changes the matrix
  // whose rows are added to one like it.
  template <class Sum, int kVector>
  struct RowSum {
    static constexpr int kAtOnce = 4;
    Matrix<const Sum> values;
    int channels;
    Sum* row;

    RowSum(Matrix<const Sum> values, int, Matrix<Sum> result, int row)
        : values(values), channels(result.columns), row(result[row]) {
      for (int c = 0; c < channels; ++c) this->row[c] = Sum(0);
    }
    void read(Matrix<const Sum> others) { values = others; }
    void add(const Neighbor<Sum>* list, int size) {
      int at = 0;
      Sum* __restrict__ to = row;
      for (; at + kAtOnce <= size; at += kAtOnce) {
        const Neighbor<Sum>* four = list + at;
        const Sum *__restrict__ a = values[four[0].at], *__restrict__ b = values[four[1].at],
                  *__restrict__ c = values[four[2].at], *__restrict__ d = values[four[3].at];
        const Sum u = four[0].value, v = four[1].value, w = four[2].value, x = four[3].value;
        for (int i = 0; i < channels; ++i) {
          to[i] =
              multiply_add(u, a[i], multiply_add(v, b[i], multiply_add(w, c[i], multiply_add(x, d[i], to[i]))));
        }
      }
      for (; at < size; ++at) {
        const Sum* __restrict__ from = values[list[at].at];
        for (int i = 0; i < channels; ++i) to[i] = multiply_add(list[at].value, from[i], to[i]);
      }
    }
    void scale(Sum factor) {
      for (int c = 0; c < channels; ++c) row[c] *= factor;
    }
    void finish(Sum factor) { scale(factor); }
  };

  // Products of a point's row with those of its neighbours.
  template <class Sum, int kVector>
  struct RowProducts {
    const Sum* row;
    Matrix<const Sum> others;
    int channels;

    RowProducts(const Sum* row, Matrix<const Sum> others, int channels)
        : row(row), others(others), channels(channels) {}
    Sum with(const Sum* other) const { return dot(row, other, channels); }
    Sum with_neighbor(const Neighbor<Sum>* list, int first, int) const { return with(others[list[first].at]); }
  };
#endif
};

}  // namespace pointproj::POINTPROJ_DEVICE
