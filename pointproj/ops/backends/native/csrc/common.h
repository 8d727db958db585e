// What both devices share: numbers, sorted points, and clouds packed one after another.
//
// Each algorithm in these headers is written once. It takes the device as a template argument: `Lanes`, one thread or
// several of a GPU warp that work on one point together (lanes.h, warp_lanes.cuh), or `Machine`, all threads of a
// build (cpu.h, cuda.cuh).
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

// Every file is compiled for a CPU and, if there is one, again for a GPU: a namespace for each.
#if defined(__CUDACC__)
#define POINTPROJ_DEVICE gpu
#define POINTPROJ_FN __device__ __forceinline__
#define POINTPROJ_EVERYWHERE __host__ __device__ __forceinline__
#define POINTPROJ_UNROLL _Pragma("unroll")
#define POINTPROJ_UNROLL_BY(count) POINTPROJ_PRAGMA(unroll count)
#define POINTPROJ_PRAGMA(text) _Pragma(#text)
#else
#define POINTPROJ_DEVICE cpu
#define POINTPROJ_FN inline __attribute__((always_inline))
#define POINTPROJ_EVERYWHERE inline
#define POINTPROJ_UNROLL
#define POINTPROJ_UNROLL_BY(count)
#endif

namespace pointproj::POINTPROJ_DEVICE {

#if defined(__CUDACC__)
constexpr bool kOnGpu = true;
#else
constexpr bool kOnGpu = false;
#endif

// Those of C know only double.
using std::cbrt, std::exp, std::fabs, std::floor, std::fma, std::nextafter, std::pow, std::sqrt;

constexpr int kNoRow = 0x7fffffff;
constexpr int kReadAhead = 16;        // points behind the last one that a CPU may read, but never uses
constexpr int kChannelsAtOnce = 32;   // of a row, which the lanes of a point hold together
constexpr double kRoundingErrors = 16;  // of a distance to a cell, in epsilons of the largest coordinate

template <class Real>
constexpr Real kEpsilon = std::numeric_limits<Real>::epsilon();
template <class Real>
constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
template <class Real>
constexpr Real kLargest = std::numeric_limits<Real>::max();
template <class Real>
constexpr Real kNan = std::numeric_limits<Real>::quiet_NaN();

// Squares of smaller distances round to 0, or to numbers of few bits: slack for that.
template <class Real>
constexpr Real kLeastDistance = static_cast<Real>(sizeof(Real) == 4 ? 1.5e-22 : 9e-162);

template <class T>
POINTPROJ_EVERYWHERE T lesser(T a, T b) { return b < a ? b : a; }

template <class T>
POINTPROJ_EVERYWHERE T greater(T a, T b) { return b > a ? b : a; }

// Entries of a table for each row: many up to some number of rows, few beyond.
struct PerRow {
  int64_t many, few, most_rows;

  POINTPROJ_EVERYWHERE int at(int64_t rows) const { return static_cast<int>(rows <= most_rows ? many : few); }
  // At least all entries, without a branch: so the size of a table is one formula of a number of rows that is a symbol.
  template <class Number>
  POINTPROJ_EVERYWHERE Number bound(const Number& rows) const {
    return lesser(Number(many * rows), greater(Number(few * rows), Number(many * most_rows)));
  }
};

template <class Real>
POINTPROJ_FN bool is_finite(Real x) { return x - x == Real(0); }

// For sums only: distances that decide which points are neighbours are rounded after every operation.
template <class Sum>
POINTPROJ_FN Sum multiply_add(Sum a, Sum b, Sum c) {
#if defined(__CUDACC__) || defined(__FMA__)
  return fma(a, b, c);
#else
  return a * b + c;
#endif
}

template <class Sum>
POINTPROJ_FN Sum dot(const Sum* a, const Sum* b, int channels) {
  Sum product = 0;
  for (int c = 0; c < channels; ++c) product = multiply_add(a[c], b[c], product);
  return product;
}

// A root that may be off by a few of its last bits.
template <class Real>
POINTPROJ_FN Real quick_sqrt(Real x) {
#if defined(__CUDACC__)
  if constexpr (sizeof(Real) == 4) {
    asm("sqrt.approx.f32 %0, %1;" : "=f"(x) : "f"(x));
    return x;
  }
#endif
  return sqrt(x);
}

template <class Real>
struct Vec3 {
  Real x[3];
  POINTPROJ_FN Real& operator[](int axis) { return x[axis]; }
  POINTPROJ_FN Real operator[](int axis) const { return x[axis]; }
};

template <class Real>
POINTPROJ_FN bool is_finite(const Vec3<Real>& p) { return is_finite(p[0]) && is_finite(p[1]) && is_finite(p[2]); }

// Rounded in the order of pointproj.ops.specification.reference.squared_distances, in a dtype at least as wide as that
// of the positions.
template <class Sum, class Real>
POINTPROJ_FN Sum squared_distance(const Vec3<Real>& p, const Vec3<Real>& q) {
  const Sum dx = p[0] - q[0], dy = p[1] - q[1], dz = p[2] - q[2];
  return (dx * dx + dy * dy) + dz * dz;
}

// The largest x with sqrt(x) <= radius, rounded as the reference does; spares every pair a root. Nothing is within a
// radius that is negative or NaN.
template <class Real>
POINTPROJ_EVERYWHERE Real largest_square_within(Real radius) {
  if (!(radius >= Real(0))) return Real(-1);
  if (!(radius < kInfinity<Real>)) return radius;
  Real square = radius * radius;
  while (sqrt(square) > radius) square = nextafter(square, Real(0));
  while (true) {
    const Real following = nextafter(square, kInfinity<Real>);
    if (!(sqrt(following) <= radius)) return square;
    square = following;
  }
}

// A matrix, its rows one behind the other.
template <class T>
struct Matrix {
  T* data;
  int columns;

  POINTPROJ_FN T* operator[](int row) const { return data + static_cast<int64_t>(row) * columns; }
};

template <class Real>
POINTPROJ_FN Vec3<Real> load_position(const Real* positions, int row) {
  const Real* from = positions + 3 * static_cast<int64_t>(row);
  return {{from[0], from[1], from[2]}};
}

template <class Real>
struct Point {
  Vec3<Real> position;
  int row;  // in the cloud as given
};

// Points in the order of their cells: rows of four on a GPU, which reads one at a time; four columns on a CPU, which
// reads the same coordinate of several. The fourth number is the row, an integer as wide as the coordinates.
template <class Real>
struct SortedPoints {
  using Row = std::conditional_t<sizeof(Real) == 4, int32_t, int64_t>;
  Real* data;
  int64_t stride;  // of the columns on a CPU

#if defined(__CUDACC__)
  struct alignas(16) Stored {
    Real x, y, z;
    Row row;
  };
  POINTPROJ_FN Point<Real> load(int at) const {
    const Stored stored = reinterpret_cast<const Stored*>(data)[at];
    return {{{stored.x, stored.y, stored.z}}, static_cast<int>(stored.row)};
  }
  POINTPROJ_FN void store(int at, const Vec3<Real>& p, int row) const {
    reinterpret_cast<Stored*>(data)[at] = {p[0], p[1], p[2], row};
  }
#else
  Row* rows() const { return reinterpret_cast<Row*>(data + 3 * stride); }
  Point<Real> load(int at) const {
    return {{{data[at], data[stride + at], data[2 * stride + at]}}, static_cast<int>(rows()[at])};
  }
  void store(int at, const Vec3<Real>& p, int row) const {
    for (int axis = 0; axis < 3; ++axis) data[axis * stride + at] = p[axis];
    rows()[at] = row;
  }
#endif
};

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
      (offsets[middle] <= row ? low : high) = middle;
    }
    return low;
  }
};

// A task writes rows of a matrix, each in one or several chunks of kChannelsAtOnce channels.
struct RowAndChunk {
  int row, chunk;
};
POINTPROJ_FN RowAndChunk split_item(int64_t item, int chunks) {
  if (chunks == 1) return {static_cast<int>(item), 0};  // spares a long division
  return {static_cast<int>(item / chunks), static_cast<int>(item % chunks)};
}

}  // namespace pointproj::POINTPROJ_DEVICE
