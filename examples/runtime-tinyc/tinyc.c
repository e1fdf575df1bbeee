#include "tinyc.h"

#include <math.h>

void tinyc_binary(char op, const float* a, const float* b, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    out[i] = op == '+'   ? a[i] + b[i]
             : op == '-' ? a[i] - b[i]
             : op == '*' ? a[i] * b[i]
             : op == '/' ? a[i] / b[i]
             : a[i] <= 0 ? 0
                         : b[i];
}

void tinyc_unary(char f, const float* a, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    out[i] = f == 'r' ? (a[i] < 0 ? 0 : a[i]) : f == 't' ? tanhf(a[i]) : expf(a[i]);
}

void tinyc_matmul(const float* a, const float* b, float* out, int64_t rows, int64_t inner, int64_t columns) {
  for (int64_t i = 0; i < rows * columns; ++i) {
    float sum = 0;
    for (int64_t k = 0; k < inner; ++k) sum += a[i / columns * inner + k] * b[k * columns + i % columns];
    out[i] = sum;
  }
}

void tinyc_copy(const float* in, const int64_t* in_strides, float* out, const int64_t* out_strides, const int64_t* sizes,
                int64_t rank) {
  if (rank == 0) {
    *out = *in;
    return;
  }
  for (int64_t i = 0; i < *sizes; ++i)
    tinyc_copy(in + i * *in_strides, in_strides + 1, out + i * *out_strides, out_strides + 1, sizes + 1, rank - 1);
}

void tinyc_add_to(const float* in, float* out, const int64_t* out_strides, const int64_t* sizes, int64_t rank) {
  if (rank == 0) {
    *out += *in;
    return;
  }
  int64_t step = 1;
  for (int64_t d = 1; d < rank; ++d) step *= sizes[d];
  for (int64_t i = 0; i < *sizes; ++i)
    tinyc_add_to(in + i * step, out + i * *out_strides, out_strides + 1, sizes + 1, rank - 1);
}
