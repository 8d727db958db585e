// What both devices share: points in the order of their cells, and clouds packed one after another.
//
// The algorithms in these headers stand once. They take their surroundings as template arguments: `Lanes`
// (one thread of a CPU or GPU, or several of a GPU warp, that work on one point together) and `Machine` (all
// threads, for the builds). Lanes are in one_lane.h and warp_lanes.cuh, machines in cpu.cpp and cuda.cuh.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__CUDACC__)
#define POINTPROJ_FN __device__ __forceinline__
#define POINTPROJ_EVERYWHERE __host__ __device__ __forceinline__
#define POINTPROJ_UNROLL _Pragma("unroll")
#else
#define POINTPROJ_FN inline
#define POINTPROJ_EVERYWHERE inline
#define POINTPROJ_UNROLL
#endif

namespace pointproj {

using std::cbrt;  // those of C know only double
using std::exp;
using std::fabs;
using std::floor;
using std::fma;
using std::sqrt;

constexpr int kNoRow = 0x7fffffff;
constexpr int kReadAhead = 16;  // points behind the last one that a CPU may read, but never uses

template <class T>
POINTPROJ_EVERYWHERE T lesser(T a, T b) {
  return b < a ? b : a;
}

template <class T>
POINTPROJ_EVERYWHERE T greater(T a, T b) {
  return b > a ? b : a;
}

template <class Real>
constexpr Real kEpsilon = std::numeric_limits<Real>::epsilon();
template <class Real>
constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
template <class Real>
constexpr Real kNan = std::numeric_limits<Real>::quiet_NaN();

template <class Real>
POINTPROJ_FN bool is_finite(Real x) {
  return x - x == Real(0);
}

// For sums alone: distances that decide who is a neighbour are rounded after every operation.
template <class Sum>
POINTPROJ_FN Sum multiply_add(Sum a, Sum b, Sum c) {
#if defined(__CUDACC__) || defined(__FMA__)
  return fma(a, b, c);
#else
  return a * b + c;
#endif
}

// A root that may be off by a few of its last bits.
POINTPROJ_FN float quick_sqrt(float x) {
#if defined(__CUDACC__)
  float root;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(x));
  return root;
#else
  return sqrt(x);
#endif
}
POINTPROJ_FN double quick_sqrt(double x) { return sqrt(x); }

template <class Real>
struct Vec3 {
  Real x[3];
  POINTPROJ_FN Real& operator[](int axis) { return x[axis]; }
  POINTPROJ_FN Real operator[](int axis) const { return x[axis]; }
};

template <class Real>
POINTPROJ_FN bool is_finite(const Vec3<Real>& p) {
  return is_finite(p[0]) && is_finite(p[1]) && is_finite(p[2]);
}

template <class Real>
POINTPROJ_FN Vec3<Real> load_row(const Real* points, int row) {
  const Real* from = points + 3 * static_cast<int64_t>(row);
  return {{from[0], from[1], from[2]}};
}

// Rounded in the order of pointproj.ops.reference.squared_distances, in a dtype at least as wide as the positions'.
template <class Sum, class Real>
POINTPROJ_FN Sum square_in(const Vec3<Real>& p, const Vec3<Real>& q) {
  const Sum dx = p[0] - q[0], dy = p[1] - q[1], dz = p[2] - q[2];
  return (dx * dx + dy * dy) + dz * dz;
}

template <class Real>
POINTPROJ_FN Real squared_distance(const Vec3<Real>& p, const Vec3<Real>& q) {
  return square_in<Real>(p, q);
}

template <class Sum, class Real>
POINTPROJ_FN Sum distance(const Vec3<Real>& p, const Vec3<Real>& q) {
  return sqrt(square_in<Sum>(p, q));
}

template <class Real>
struct RowBits;
template <>
struct RowBits<float> {
  using Integer = int32_t;
};
template <>
struct RowBits<double> {
  using Integer = int64_t;
};

template <class Real>
POINTPROJ_FN Real row_to_bits(int row) {
  const typename RowBits<Real>::Integer wide = row;
  Real bits;
  memcpy(&bits, &wide, sizeof(bits));
  return bits;
}

template <class Real>
POINTPROJ_FN int row_from_bits(Real bits) {
  typename RowBits<Real>::Integer wide;
  memcpy(&wide, &bits, sizeof(wide));
  return static_cast<int>(wide);
}

template <class Real>
struct Point {
  Vec3<Real> position;
  int row;  // in the cloud as given
};

// Sorted points: rows of four on a GPU, which reads one at a time; four columns on a CPU, which reads the same
// coordinate of several.
template <class Real>
struct Points {
  Real* data;
  int64_t stride;  // of the columns on a CPU
  int count;

#if defined(__CUDACC__)
  POINTPROJ_FN Point<Real> load(int at) const;
  POINTPROJ_FN void store(int at, const Vec3<Real>& p, int row) const;
#else
  Point<Real> load(int at) const {
    return {{{data[at], data[stride + at], data[2 * stride + at]}}, row_from_bits(data[3 * stride + at])};
  }
  void store(int at, const Vec3<Real>& p, int row) const {
    for (int axis = 0; axis < 3; ++axis) data[axis * stride + at] = p[axis];
    data[3 * stride + at] = row_to_bits<Real>(row);
  }
#endif
};

#if defined(__CUDACC__)
template <>
POINTPROJ_FN Point<float> Points<float>::load(int at) const {
  const float4 v = reinterpret_cast<const float4*>(data)[at];
  return {{{v.x, v.y, v.z}}, row_from_bits(v.w)};
}
template <>
POINTPROJ_FN Point<double> Points<double>::load(int at) const {
  const double2* from = reinterpret_cast<const double2*>(data) + 2 * static_cast<int64_t>(at);
  const double2 xy = from[0], zw = from[1];
  return {{{xy.x, xy.y, zw.x}}, row_from_bits(zw.y)};
}
template <>
POINTPROJ_FN void Points<float>::store(int at, const Vec3<float>& p, int row) const {
  reinterpret_cast<float4*>(data)[at] = make_float4(p[0], p[1], p[2], row_to_bits<float>(row));
}
template <>
POINTPROJ_FN void Points<double>::store(int at, const Vec3<double>& p, int row) const {
  double2* to = reinterpret_cast<double2*>(data) + 2 * static_cast<int64_t>(at);
  to[0] = make_double2(p[0], p[1]);
  to[1] = make_double2(p[2], row_to_bits<double>(row));
}
#endif

// A point among the searched ones, with its squared distance, later its weight.
template <class Sum>
struct alignas(2 * sizeof(Sum)) Neighbor {
  Sum number;
  int at;
};
constexpr int kMostWaiting = 32;     // neighbours of one point that have yet to be added up
constexpr int kChannelsAtOnce = 32;  // of a row, in all lanes of a point together

// An item is a row of the result, or one of several chunks of its channels.
struct RowAndChunk {
  int row, chunk;
};
POINTPROJ_FN RowAndChunk split_item(int64_t item, int chunks) {
  if (chunks == 1) return {static_cast<int>(item), 0};  // spares a long division
  return {static_cast<int>(item / chunks), static_cast<int>(item % chunks)};
}

// Clouds packed one after another: of equal size, or between offsets.
struct Batch {
  const int* offsets;  // (clouds + 1,), or null
  int rows;
  int clouds;

  POINTPROJ_FN int first_row(int cloud) const {
    if (clouds == 1) return cloud * rows;
    return offsets ? offsets[cloud] : cloud * (rows / clouds);
  }
  POINTPROJ_FN int cloud_of(int row) const {
    if (clouds == 1) return 0;
    if (!offsets) return row / (rows / clouds);
    int low = 0, high = clouds;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (offsets[middle] <= row) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

}  // namespace pointproj
