#include "tinyc.h"

#include <math.h>

void tinyc_binary(char op, const float* a, const float* b, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    out[i] = op == '+'   ? a[i] + b[i]
             : op == '-' ? a[i] - b[i]
             : op == '*' ? a[i] * b[i]
             : op == '/' ? a[i] / b[i]
             : op == '>' ? a[i] > b[i]
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

void tinyc_sum(const float* in, float* out, int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; ++i) {
    float sum = 0;
    for (int64_t k = 0; k < columns; ++k) sum += in[i * columns + k];
    out[i] = sum;
  }
}

void tinyc_softmax(const float* in, float* out, int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; ++i, in += columns, out += columns) {
    float greatest = -INFINITY, sum = 0;
    for (int64_t k = 0; k < columns; ++k) greatest = in[k] > greatest || isnan(in[k]) ? in[k] : greatest;
    for (int64_t k = 0; k < columns; ++k) sum += out[k] = expf(in[k] - greatest);
    for (int64_t k = 0; k < columns; ++k) out[k] /= sum;
  }
}
