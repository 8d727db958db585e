// What a distance weighs, and the derivatives of that; pointproj/ops/specification/reference.py and gradients.py have the formulas.
//
// The table: one struct for each kernel, with
//   kAbsolute                  the anchor with which weight() is the formula itself
//   anchor(nearest)            what the weights of a row are relative to, so that they cannot all vanish
//   weight(distance, anchor)
//   fall(distance)             minus the derivative of the logarithm of the weight by the distance
//   sigma_term(distance, base) a part of the derivative by sigma, which of_sigma(sum of such terms) completes; less
//                              that at a base, the same for a whole row: terms need not cancel in a mean
#pragma once

#include "common.h"

namespace pointproj::POINTPROJ_DEVICE {

enum class Kernel { kExponential, kGaussian, kInverseDistance, kUniform, kCompact };
enum class Reduce { kMean, kSum, kWeighted };

template <class Sum>
constexpr Sum kMostWeight = kLargest<Sum> / 2048;

// What kernels are given, and what those that say nothing else have.
template <class Sum>
struct Uniform {
  static constexpr Sum kAbsolute = 0;
  Sum per_sigma;
  Sum power, eps;  // of the inverse distance
  Sum support;     // of the compact kernel

  POINTPROJ_FN Sum anchor(Sum) const { return kAbsolute; }
  POINTPROJ_FN Sum weight(Sum, Sum) const { return Sum(1); }
  POINTPROJ_FN Sum fall(Sum) const { return Sum(0); }
  POINTPROJ_FN Sum sigma_term(Sum distance, Sum base) const { return distance - base; }
  POINTPROJ_FN Sum of_sigma(Sum) const { return Sum(0); }
};

template <class Sum>
struct Exponential : Uniform<Sum> {
  POINTPROJ_FN Sum anchor(Sum nearest) const { return nearest; }
  POINTPROJ_FN Sum weight(Sum distance, Sum anchor) const { return exp((anchor - distance) * this->per_sigma); }
  POINTPROJ_FN Sum fall(Sum) const { return this->per_sigma; }
  POINTPROJ_FN Sum of_sigma(Sum terms) const { return terms * this->per_sigma * this->per_sigma; }
};

template <class Sum>
struct Gaussian : Uniform<Sum> {
  POINTPROJ_FN Sum anchor(Sum nearest) const { return nearest; }
  POINTPROJ_FN Sum weight(Sum distance, Sum anchor) const {
    return exp((anchor - distance) * this->per_sigma * (anchor + distance) * this->per_sigma / Sum(2));  // never 0 inf
  }
  POINTPROJ_FN Sum fall(Sum distance) const {
    return lesser(distance * this->per_sigma * this->per_sigma, kLargest<Sum>);  // times 0 it is 0
  }
  POINTPROJ_FN Sum sigma_term(Sum distance, Sum base) const { return (distance - base) * (distance + base); }
  POINTPROJ_FN Sum of_sigma(Sum terms) const {
    return terms * this->per_sigma * this->per_sigma * this->per_sigma;
  }
};

template <class Sum>
struct InverseDistance : Uniform<Sum> {
  static constexpr Sum kAbsolute = 1;
  POINTPROJ_FN Sum anchor(Sum nearest) const { return greater(nearest, this->eps); }
  POINTPROJ_FN Sum weight(Sum distance, Sum anchor) const {
    return pow(anchor / greater(distance, this->eps), this->power);
  }
  POINTPROJ_FN Sum fall(Sum distance) const { return distance > this->eps ? this->power / distance : Sum(0); }
};

template <class Sum>
struct Compact : Uniform<Sum> {
  POINTPROJ_FN Sum weight(Sum distance, Sum) const { return rest(distance) * rest(distance); }
  POINTPROJ_FN Sum fall(Sum distance) const {
    const Sum left = rest(distance);
    return left > Sum(0) ? 4 * distance / (this->support * this->support * left) : Sum(0);
  }
  // Divided by the support, not multiplied by its inverse: at the support itself it must be 0.
  POINTPROJ_FN Sum rest(Sum distance) const {
    const Sum part = distance / this->support;
    return greater(Sum(0), Sum(1) - part * part);
  }
};

// Sums and gradients take a weighting as template argument: the default, in which nothing is left to decide, and one
// that is any of them, because code for each would take many times as long to compile.
template <class Sum_, bool kIsDefault>
struct Weighting {
  using Sum = Sum_;
  const Sum* sigma;
  Kernel kernel;
  Reduce reduce;
  Uniform<Sum> scales;  // per_sigma is filled in by at_sigma()

  POINTPROJ_FN Weighting at_sigma() const {
    Weighting known = *this;
    known.scales.per_sigma = Sum(1) / *sigma;
    return known;
  }
  // A mean is divided by the total of the weights.
  POINTPROJ_FN bool divides() const { return kIsDefault || reduce != Reduce::kSum; }
  // Whether a neighbour with this row of features is one of those whose weights add up to the total.
  POINTPROJ_FN bool counts(const Sum* features, int channels) const {
    return kIsDefault || reduce != Reduce::kWeighted || features[channels - 1] != Sum(0);
  }
  // Not relative are the weights of sums, which count as they are.
  POINTPROJ_FN Sum anchor(Sum nearest) const {
    return with([&](const auto& kernel) { return divides() ? kernel.anchor(nearest) : kernel.kAbsolute; });
  }
  // A number also of one that does not count, which may be much nearer than the anchor.
  POINTPROJ_FN Sum weight(Sum distance, Sum anchor) const {
    const Sum made = with([&](const auto& kernel) { return kernel.weight(distance, anchor); });
    return kIsDefault ? made : lesser(made, kMostWeight<Sum>);
  }
  POINTPROJ_FN Sum fall(Sum distance) const {
    return with([&](const auto& kernel) { return kernel.fall(distance); });
  }
  POINTPROJ_FN Sum sigma_term(Sum distance, Sum base) const {
    return with([&](const auto& kernel) { return kernel.sigma_term(distance, base); });
  }
  POINTPROJ_FN Sum of_sigma(Sum terms) const {
    return with([&](const auto& kernel) { return kernel.of_sigma(terms); });
  }
  // What sums are multiplied by in the end.
  POINTPROJ_FN Sum inverse(Sum total) const {
    if (!divides()) return Sum(1);
    return total > Sum(0) ? Sum(1) / total : Sum(0);
  }

 private:
  template <class Use>
  POINTPROJ_FN Sum with(Use use) const {
    if constexpr (kIsDefault) return use(Exponential<Sum>{scales});
    switch (kernel) {
      case Kernel::kExponential:
        return use(Exponential<Sum>{scales});
      case Kernel::kGaussian:
        return use(Gaussian<Sum>{scales});
      case Kernel::kInverseDistance:
        return use(InverseDistance<Sum>{scales});
      case Kernel::kCompact:
        return use(Compact<Sum>{scales});
      default:
        return use(scales);
    }
  }
};

template <class Sum>
using DefaultWeighting = Weighting<Sum, true>;
template <class Sum>
using AnyWeighting = Weighting<Sum, false>;

}  // namespace pointproj::POINTPROJ_DEVICE
