// The running softmax of -distance / sigma, and the weighted sum of rows under it.
#pragma once

#include "common.h"

namespace pointproj {

// Neighbours of one point that wait until there are enough to be worth adding up.
template <class Sum, class Lanes>
struct Queue {
  Neighbor<Sum>* list;
  int size = 0;

  POINTPROJ_FN explicit Queue(Lanes& lanes) : list(lanes.template list<Sum>()) {}
  // One candidate a lane.
  POINTPROJ_FN void push(Lanes& lanes, bool hit, int at, Sum squared) {
    const unsigned hits = lanes.ballot(hit);
    if (hit) list[size + lanes.bits_before(hits)] = {squared, at};
    size += lanes.bit_count(hits);
  }
  POINTPROJ_FN bool is_full() const { return size > kMostWaiting - Lanes::kMostAtOnce; }
  // settle(list, size) adds up those that wait.
  template <class Settle>
  POINTPROJ_FN void drain(Lanes& lanes, Settle& settle) {
    lanes.sync();
    settle(list, size);
    lanes.sync();
    size = 0;
  }
};

// kVector values of a row are read at a time; rows then start at multiples of that.
template <class Sum, int kVector, class Lanes>
struct Softmax {
  Sum per_sigma;
  Sum nearest;  // weights are relative to this distance, the same in all lanes: a lone neighbour has exactly 1
  Sum total;    // of this lane's weights
  typename Lanes::template RowSum<Sum, kVector> sums;

  POINTPROJ_FN explicit Softmax(Sum sigma) : per_sigma(Sum(1) / sigma), nearest(kInfinity<Sum>), total(Sum(0)) {}
  // Squared distances in the list become weights.
  POINTPROJ_FN void add(Lanes& lanes, Neighbor<Sum>* list, int size) {
    Sum least = kInfinity<Sum>;
    for (int i = lanes.lane(); i < size; i += Lanes::width) least = lesser(least, list[i].number);
    const Sum now = lesser(Sum(sqrt(lanes.minimum(least))), nearest);
    if (lanes.anywhere(now < nearest)) {
      const Sum rescale = now < nearest ? Sum(exp((now - nearest) * per_sigma)) : Sum(1);  // 0 at first
      total *= rescale;
      sums.scale(rescale);
      nearest = now;
    }
    for (int i = lanes.lane(); i < size; i += Lanes::width) {
      const Sum weight = exp((nearest - Sum(sqrt(list[i].number))) * per_sigma);
      total += weight;
      list[i].number = weight;
    }
    lanes.sync();
    sums.add(list, size);
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
