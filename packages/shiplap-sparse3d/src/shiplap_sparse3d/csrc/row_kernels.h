// Kernels that treat each channel by itself, over the rows of a table: no matrix product in them.
#ifndef SHIPLAP_SPARSE3D_ROW_KERNELS_H_
#define SHIPLAP_SPARSE3D_ROW_KERNELS_H_

#include <cstdint>

#include "number.h"

namespace shiplap::sparse3d {

// A block of table rows and what its entries point to.
template <class S>
struct TableRows {
  const int32_t* table;  // [rows, taps], rows `stride` entries apart
  int64_t stride;
  int64_t rows;
  int64_t taps;
  int64_t limit;  // entries must lie in [-1, limit)
  const S* feats;  // [limit, channels]
  int64_t channels;
};

// out[i, c] = bias[c] + sum over taps v of weight[v, c] * feats[table[i, v], c]
template <class S>
struct Depthwise {
  TableRows<S> at;
  const Sum<S>* weight;   // [taps, weight_stride]
  int64_t weight_stride;  // channels, rounded up to whole vectors of any instruction set
  const Sum<S>* bias;     // [weight_stride]
  S* out;                 // [rows, channels]
};

// sums[v, c] += sum over rows i of grad[i, c] * feats[table[i, v], c]
template <class S>
struct DepthwiseGrad {
  TableRows<S> at;
  const S* grad;        // [rows, channels]
  Sum<S>* sums;         // [taps, sums_stride]
  int64_t sums_stride;  // like weight_stride
};

// out[i, c] = sum over taps v of feats[table[i, v], c], or that over the number of hits; zero without.
template <class S>
struct SumPool {
  TableRows<S> at;
  bool average;
  S* out;  // [rows, channels]
};

// The largest value under the taps of a row and the first tap that has it; NaN beats every number.
template <class S>
struct MaxPool {
  TableRows<S> at;
  S* out;         // [rows, channels], zero without hits
  int16_t* taps;  // [rows, channels], -1 without hits
};

// out[i, c] = sum of feats[table[i, v], c] over the taps v that taps[table[i, v], c] names.
template <class S>
struct MaxPoolGrad {
  TableRows<S> at;      // `feats` is the gradient of what was pooled
  const int16_t* taps;  // [limit, channels]
  S* out;               // [rows, channels]
};

// Kernels return false, and have read no row through it, when an entry is out of range.
template <class S>
struct RowKernels {
  bool (*depthwise)(const Depthwise<S>&);
  bool (*depthwise_grad)(const DepthwiseGrad<S>&);
  bool (*sum_pool)(const SumPool<S>&);
  bool (*max_pool)(const MaxPool<S>&);
  bool (*max_pool_grad)(const MaxPoolGrad<S>&);
};

}  // namespace shiplap::sparse3d

#endif  // SHIPLAP_SPARSE3D_ROW_KERNELS_H_
