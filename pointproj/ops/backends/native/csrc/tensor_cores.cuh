// Products of matrices on tensor cores, in single precision.
//
// Numbers are split in two of 11 bits each, of whose products three are added up: about as exact as single precision.
#pragma once

#include "common.h"

namespace pointproj {

struct Split {
  uint32_t high, low;
};

POINTPROJ_FN uint32_t eleven_bits(float x) {
  uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(x));
  return rounded;
}

POINTPROJ_FN Split split(float x) {
  const uint32_t high = eleven_bits(x);
  return {high, eleven_bits(x - __uint_as_float(high))};
}

// sums (16, 8) += left (16, 8) right (8, 8); who holds what is in the documentation of mma.m16n8k8.
POINTPROJ_FN void multiply_add_tf32(float (&sums)[4], const uint32_t (&left)[4], uint32_t right_0, uint32_t right_1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right_0), "r"(right_1));
}

struct SplitLeft {
  uint32_t high[4], low[4];

  POINTPROJ_FN void set(int i, float x) {
    const Split parts = split(x);
    high[i] = parts.high;
    low[i] = parts.low;
  }
};

// left_first: which of the two middle products is added first; sums of (left, right) and of (right, left) are the same
// to the last bit if one of them has it and the other not.
template <bool left_first>
POINTPROJ_FN void multiply_add(float (&sums)[4], const SplitLeft& left, float right_0, float right_1) {
  const Split first = split(right_0), second = split(right_1);
  if (left_first) multiply_add_tf32(sums, left.low, first.high, second.high);
  multiply_add_tf32(sums, left.high, first.low, second.low);
  if (!left_first) multiply_add_tf32(sums, left.low, first.high, second.high);
  multiply_add_tf32(sums, left.high, first.high, second.high);
}

}  // namespace pointproj
