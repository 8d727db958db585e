// The rows of neighbour lists, padded or CSR, as tensors hold them.
#pragma once

#include "common.h"

namespace pointproj::POINTPROJ_DEVICE {

// Lists of rows, which may be any numbers: neighbours are those that are rows of the references.
struct ListedRows {
  const int64_t* rows;        // (pairs,)
  const int64_t* row_splits;  // (Q + 1,), or null: each query has k pairs
  int64_t k, capacity;        // pairs of a query; of all
  int queries, references;

  POINTPROJ_FN int64_t first_pair(int query) const {
    return row_splits ? lesser(row_splits[query], capacity) : query * k;
  }
  POINTPROJ_FN int operator()(int64_t pair) const {
    const int64_t row = rows[pair];
    return row >= 0 && row < references && pair < first_pair(queries) ? static_cast<int>(row) : -1;
  }
  POINTPROJ_FN int query_of(int64_t pair) const {
    if (!row_splits) return static_cast<int>(pair / k);
    int low = 0, high = queries;
    while (high - low > 1) {
      const int middle = low + (high - low) / 2;
      (row_splits[middle] <= pair ? low : high) = middle;
    }
    return low;
  }
};

}  // namespace pointproj::POINTPROJ_DEVICE
