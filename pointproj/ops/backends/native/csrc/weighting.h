// What a distance weighs, and the derivatives of that; pointproj/ops/reference.py and gradients.py have the formulas.
//
// Sums and gradients take a weighting as template argument: the default, in which nothing is left to decide, and one
// that is any of them, because code for each would take many times as long to compile. at_sigma() reads sigma, and
// what it returns has
//   anchor(nearest)            what the weights of a row are relative to, so that they cannot all vanish
//   weight(distance, anchor)
//   inverse(total)             what sums are multiplied by in the end
//   divides                    whether that is the inverse of the total weight
//   fall(distance)             minus the derivative of the logarithm of the weight by the distance
//   sigma_term(distance)       a part of the derivative by sigma, which of_sigma(sum of such terms) completes
#pragma once

#include "common.h"

namespace pointproj {

// exp(-distance / sigma), divided by the total.
template <class Sum_>
struct DefaultWeighting {
  using Sum = Sum_;
  const Sum* sigma;

  struct AtSigma {
    static constexpr bool divides = true;
    Sum per_sigma;

    POINTPROJ_FN Sum anchor(Sum nearest) const { return nearest; }
    POINTPROJ_FN Sum weight(Sum distance, Sum anchor) const { return exp((anchor - distance) * per_sigma); }
    POINTPROJ_FN Sum inverse(Sum total) const { return total > Sum(0) ? Sum(1) / total : Sum(0); }
    POINTPROJ_FN Sum fall(Sum) const { return per_sigma; }
    POINTPROJ_FN Sum sigma_term(Sum distance) const { return distance; }
    POINTPROJ_FN Sum of_sigma(Sum terms) const { return terms * per_sigma * per_sigma; }
  };
  POINTPROJ_FN AtSigma at_sigma() const { return {Sum(1) / *sigma}; }
};

enum class Kernel { kExponential, kGaussian, kInverseDistance, kUniform, kCompact };

template <class Sum_>
struct AnyWeighting {
  using Sum = Sum_;
  const Sum* sigma;
  Kernel kernel;
  bool divides;
  Sum power, eps;  // of the inverse distance
  Sum support;     // of the compact kernel

  struct AtSigma {
    const AnyWeighting& given;
    bool divides;
    Sum per_sigma;

    // Not relative are sums, to which every weight counts as it is, and weights that cannot vanish in rounding.
    POINTPROJ_FN Sum anchor(Sum nearest) const {
      switch (given.kernel) {
        case Kernel::kExponential:
        case Kernel::kGaussian:
          return divides ? nearest : Sum(0);
        case Kernel::kInverseDistance:
          return divides ? greater(nearest, given.eps) : Sum(1);
        default:
          return Sum(0);
      }
    }
    POINTPROJ_FN Sum weight(Sum distance, Sum anchor) const {
      switch (given.kernel) {
        case Kernel::kExponential:
          return exp((anchor - distance) * per_sigma);
        case Kernel::kGaussian:
          return exp((anchor - distance) * per_sigma * (anchor + distance) * per_sigma / Sum(2));  // never 0 inf
        case Kernel::kInverseDistance:
          return pow(anchor / greater(distance, given.eps), given.power);
        case Kernel::kCompact:
          return rest(distance) * rest(distance);
        default:
          return Sum(1);
      }
    }
    POINTPROJ_FN Sum inverse(Sum total) const {
      if (!divides) return Sum(1);
      return total > Sum(0) ? Sum(1) / total : Sum(0);
    }
    POINTPROJ_FN Sum fall(Sum distance) const {
      switch (given.kernel) {
        case Kernel::kExponential:
          return per_sigma;
        case Kernel::kGaussian:
          return lesser(distance * per_sigma * per_sigma, kLargest<Sum>);  // times 0 it is 0
        case Kernel::kInverseDistance:
          return distance > given.eps ? given.power / distance : Sum(0);
        case Kernel::kCompact:
          return rest(distance) > Sum(0) ? 4 * distance / (given.support * given.support * rest(distance)) : Sum(0);
        default:
          return Sum(0);
      }
    }
    POINTPROJ_FN Sum sigma_term(Sum distance) const {
      return given.kernel == Kernel::kGaussian ? distance * distance : distance;
    }
    POINTPROJ_FN Sum of_sigma(Sum terms) const {
      switch (given.kernel) {
        case Kernel::kExponential:
          return terms * per_sigma * per_sigma;
        case Kernel::kGaussian:
          return terms * per_sigma * per_sigma * per_sigma;
        default:
          return Sum(0);
      }
    }
    // Divided by the support, not multiplied by its inverse: at the support itself it must be 0.
    POINTPROJ_FN Sum rest(Sum distance) const {
      const Sum part = distance / given.support;
      return greater(Sum(0), Sum(1) - part * part);
    }
  };
  POINTPROJ_FN AtSigma at_sigma() const { return {*this, divides, Sum(1) / *sigma}; }
};

}  // namespace pointproj
