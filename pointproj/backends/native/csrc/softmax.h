// The running softmax of -distance / sigma, and the weighted sum of rows under it.
#pragma once

#include "common.h"

namespace pointproj {

// kVector values of a row are read at a time; rows then start at multiples of that.
template <class Sum, int kVector, class Lanes>
struct Softmax {
  Sum per_sigma;
  Sum nearest;  // weights are relative to this distance, the same in all lanes: a lone neighbour has exactly 1
  Sum total;    // of this lane's weights
  typename Lanes::template RowSum<Sum, kVector> sums;

  POINTPROJ_FN explicit Softmax(Sum sigma) : per_sigma(Sum(1) / sigma), nearest(kInfinity<Sum>), total(Sum(0)) {}
  // One neighbour a lane; those that exist are in the first lanes.
  POINTPROJ_FN void add(Lanes& lanes, int at, Sum far, bool exists) {
    if (lanes.anywhere(exists && far < nearest)) {
      const Sum now = lanes.minimum(exists ? lesser(far, nearest) : nearest);
      const Sum rescale = now < nearest ? Sum(exp((now - nearest) * per_sigma)) : Sum(1);  // 0 at first
      total *= rescale;
      sums.scale(rescale);
      nearest = now;
    }
    const Sum weight = exists ? Sum(exp((nearest - far) * per_sigma)) : Sum(0);
    total += weight;
    sums.add(lanes, at, weight, exists);
  }
  // 1 / total weight; 0 without neighbours.
  POINTPROJ_FN Sum inverse(Lanes& lanes) const {
    const Sum all = lanes.sum(total);
    return all > Sum(0) ? Sum(1) / all : Sum(0);
  }
};

template <class Sum>
POINTPROJ_FN Sum dot(const Sum* a, const Sum* b, int channels) {
  Sum product = 0;
  for (int c = 0; c < channels; ++c) product = multiply_add(a[c], b[c], product);
  return product;
}

}  // namespace pointproj
