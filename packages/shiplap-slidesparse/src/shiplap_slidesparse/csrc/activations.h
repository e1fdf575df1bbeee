// Rows of activations, quantised as quantise.py defines it, and lifted.
#pragma once

#include "operands.h"

namespace shiplap::slidesparse {

struct Activations {
  const char* x;  // [rows, k] of `element`
  int64_t rows, k, itemsize;
  int element;
  int64_t pairs;  // 0: not lifted, rows as long as they are
  bool float8;
  const int64_t* order = nullptr;  // the numbers of the rows to take, or all in turn
};

// Bytes of scratch per thread: a row of floats and one of bytes, with room for a whole group behind it.
inline int64_t quantise_room(int64_t k) { return round_up(4 * k, 64) + round_up(k + 16, 64); }

// `q` [rows, depth] bytes and a scale for each row.
void quantise_rows(const Kernels& kernels, const Activations& a, int64_t depth, int threads, char* rooms, uint8_t* q,
                   float* scale);

}  // namespace shiplap::slidesparse
