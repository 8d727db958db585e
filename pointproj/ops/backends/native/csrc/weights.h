// Weights by distance, and their derivatives; pointproj/ops/specification/reference.py and gradients.py have the
// formulas, and docs/contribute/kernels.md a table of the names.
//
// One struct for each kernel, with
//   kBaseOfSum                            the base whose weight is 1
//   base(nearest)                         the distance that weights of a mean are relative to: not all of them vanish
//   weight(distance, base)                the kernel at the distance, divided by the kernel at the base
//   decay(distance)                       minus the derivative of the logit by the distance; where it is 0, so is the
//                                         gradient, even if that of the logit is infinite
//   decay_slope(distance)                 the derivative of that by the distance
//   kSigmaPower                           of 1 / sigma, in the derivative of the logit by sigma; one less in decay
//   unscaled_by_sigma(distance, base)     the derivative of the logit by sigma, less that at the base, so that terms of
//                                         a mean need not cancel; without its power of sigma
//   by_sigma(unscaled)                    the same with the power of sigma, also of a sum of such terms
#pragma once

#include <string_view>

#include "common.h"

namespace pointproj::POINTPROJ_DEVICE {

enum class Kernel { kExponential, kGaussian, kInverseDistance, kUniform, kCompact };
constexpr std::string_view kKernelNames[] = {"exponential", "gaussian", "inverse_distance", "uniform", "compact"};
enum class Reduce { kMean, kSum, kWeighted };
constexpr std::string_view kReduceNames[] = {"mean", "sum", "weighted"};

template <class Sum>
constexpr Sum kLargestWeight = kLargest<Sum> / 2048;

// The kernel of weight 1, with what all kernels are given. The others override what is not the same for them.
template <class Sum>
struct Uniform {
  static constexpr Sum kBaseOfSum = 0, kSigmaPower = 1;
  Sum inverse_sigma;
  Sum power, eps;  // of the inverse distance
  Sum support;     // of the compact kernel

  POINTPROJ_FN Sum base(Sum) const { return kBaseOfSum; }
  POINTPROJ_FN Sum weight(Sum, Sum) const { return Sum(1); }
  POINTPROJ_FN Sum decay(Sum) const { return Sum(0); }
  POINTPROJ_FN Sum decay_slope(Sum) const { return Sum(0); }
  POINTPROJ_FN Sum unscaled_by_sigma(Sum distance, Sum base) const { return distance - base; }
  POINTPROJ_FN Sum by_sigma(Sum) const { return Sum(0); }
};

template <class Sum>
struct Exponential : Uniform<Sum> {
  static constexpr Sum kSigmaPower = 2;
  POINTPROJ_FN Sum base(Sum nearest) const { return nearest; }
  POINTPROJ_FN Sum weight(Sum distance, Sum base) const { return exp((base - distance) * this->inverse_sigma); }
  POINTPROJ_FN Sum decay(Sum) const { return this->inverse_sigma; }
  POINTPROJ_FN Sum by_sigma(Sum unscaled) const { return unscaled * this->inverse_sigma * this->inverse_sigma; }
};

template <class Sum>
struct Gaussian : Uniform<Sum> {
  static constexpr Sum kSigmaPower = 3;
  POINTPROJ_FN Sum base(Sum nearest) const { return nearest; }
  POINTPROJ_FN Sum weight(Sum distance, Sum base) const {
    // In this order it is never 0 times infinity.
    return exp((base - distance) * this->inverse_sigma * (base + distance) * this->inverse_sigma / Sum(2));
  }
  POINTPROJ_FN Sum decay(Sum distance) const {
    return lesser(distance * this->inverse_sigma * this->inverse_sigma, kLargest<Sum>);  // times 0 it is 0
  }
  POINTPROJ_FN Sum decay_slope(Sum) const {
    return lesser(this->inverse_sigma * this->inverse_sigma, kLargest<Sum>);
  }
  POINTPROJ_FN Sum unscaled_by_sigma(Sum distance, Sum base) const { return (distance - base) * (distance + base); }
  POINTPROJ_FN Sum by_sigma(Sum unscaled) const {
    return unscaled * this->inverse_sigma * this->inverse_sigma * this->inverse_sigma;
  }
};

template <class Sum>
struct InverseDistance : Uniform<Sum> {
  static constexpr Sum kBaseOfSum = 1;
  POINTPROJ_FN Sum base(Sum nearest) const { return greater(nearest, this->eps); }
  POINTPROJ_FN Sum weight(Sum distance, Sum base) const {
    return pow(base / greater(distance, this->eps), this->power);
  }
  POINTPROJ_FN Sum decay(Sum distance) const { return distance >= this->eps ? this->power / distance : Sum(0); }
  POINTPROJ_FN Sum decay_slope(Sum distance) const {
    return distance >= this->eps ? -this->power / distance / distance : Sum(0);
  }
};

template <class Sum>
struct Compact : Uniform<Sum> {
  POINTPROJ_FN Sum weight(Sum distance, Sum) const { return root(distance) * root(distance); }
  POINTPROJ_FN Sum decay(Sum distance) const {
    const Sum root_of_weight = root(distance);
    return root_of_weight > Sum(0) ? 4 * distance / (this->support * this->support * root_of_weight) : Sum(0);
  }
  POINTPROJ_FN Sum decay_slope(Sum distance) const {
    const Sum part = distance / this->support, root_of_weight = root(distance);
    if (!(root_of_weight > Sum(0))) return Sum(0);
    const Sum scaled = this->support * root_of_weight;
    return 4 * (1 + part * part) / (scaled * scaled);
  }
  // The root of the weight. Divided by the support, not multiplied by its inverse: at the support itself it must be 0.
  POINTPROJ_FN Sum root(Sum distance) const {
    const Sum part = distance / this->support;
    return greater(Sum(0), Sum(1) - part * part);
  }
};

// The kernel of a call, as template argument of sums and gradients. There are two: the default kernel and reduction,
// known to the compiler, and any of them, decided at run time. One for each would take many times as long to compile.
template <class Sum_, bool kIsDefault>
struct Weighting {
  using Sum = Sum_;
  const Sum* sigma;
  Kernel kernel;
  Reduce reduce;
  Uniform<Sum> parameters;  // at_sigma() fills in inverse_sigma

  POINTPROJ_FN Weighting at_sigma() const {
    Weighting known = *this;
    known.parameters.inverse_sigma = Sum(1) / *sigma;
    return known;
  }
  // Whether sums are divided by the total.
  POINTPROJ_FN bool divides() const { return kIsDefault || reduce != Reduce::kSum; }
  // Whether a neighbour with this row of features has a weight, which is part of the total.
  POINTPROJ_FN bool has_weight(const Sum* features, int channels) const {
    return kIsDefault || reduce != Reduce::kWeighted || features[channels - 1] != Sum(0);
  }
  POINTPROJ_FN Sum base(Sum nearest) const {
    return with([&](const auto& kernel) { return divides() ? kernel.base(nearest) : kernel.kBaseOfSum; });
  }
  // Also finite for a neighbour without a weight, which may be much nearer than the base.
  POINTPROJ_FN Sum weight(Sum distance, Sum base) const {
    const Sum made = with([&](const auto& kernel) { return kernel.weight(distance, base); });
    return kIsDefault || reduce != Reduce::kWeighted ? made : lesser(made, kLargestWeight<Sum>);
  }
  POINTPROJ_FN Sum decay(Sum distance) const { return with([&](auto kernel) { return kernel.decay(distance); }); }
  POINTPROJ_FN Sum decay_slope(Sum distance) const {
    return with([&](auto kernel) { return kernel.decay_slope(distance); });
  }
  POINTPROJ_FN Sum sigma_power() const { return with([&](auto kernel) { return kernel.kSigmaPower; }); }
  POINTPROJ_FN Sum unscaled_by_sigma(Sum distance, Sum base) const {
    return with([&](const auto& kernel) { return kernel.unscaled_by_sigma(distance, base); });
  }
  POINTPROJ_FN Sum by_sigma(Sum unscaled) const { return with([&](auto kernel) { return kernel.by_sigma(unscaled); }); }
  // The factor of the sums: 1 / total where they are divided by it.
  POINTPROJ_FN Sum inverse_total(Sum total) const {
    if (!divides()) return Sum(1);
    return total > Sum(0) ? Sum(1) / total : Sum(0);
  }

 private:
  template <class Use>
  POINTPROJ_FN Sum with(Use use) const {
    if constexpr (kIsDefault) return use(Exponential<Sum>{parameters});
    switch (kernel) {
      case Kernel::kExponential: return use(Exponential<Sum>{parameters});
      case Kernel::kGaussian: return use(Gaussian<Sum>{parameters});
      case Kernel::kInverseDistance: return use(InverseDistance<Sum>{parameters});
      case Kernel::kCompact: return use(Compact<Sum>{parameters});
      default: return use(parameters);
    }
  }
};

template <class Sum>
using DefaultWeighting = Weighting<Sum, true>;
template <class Sum>
using AnyWeighting = Weighting<Sum, false>;

}  // namespace pointproj::POINTPROJ_DEVICE
