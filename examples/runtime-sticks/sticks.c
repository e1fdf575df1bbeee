#include "sticks.h"

#include <math.h>
#include <string.h>

typedef _Float16 half;
enum { WIDTH = 32 };

static int64_t sticks(int64_t n) { return (n + WIDTH - 1) / WIDTH; }
static int64_t place(int64_t rows, int64_t r, int64_t c) { return (c / WIDTH * rows + r) * WIDTH + c % WIDTH; }

size_t st_size(int64_t rows, int64_t cols) { return (size_t)(rows * sticks(cols) * WIDTH); }

void st_pack(const void* dense, void* out, int64_t rows, int64_t cols) {
  memset(out, 0, st_size(rows, cols) * sizeof(half));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) ((half*)out)[place(rows, r, c)] = ((const half*)dense)[r * cols + c];
  }
}

void st_unpack(const void* in, void* dense, int64_t rows, int64_t cols) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) ((half*)dense)[r * cols + c] = ((const half*)in)[place(rows, r, c)];
  }
}

static float binary(char op, float x, float y) {
  switch (op) {
    case '+': return x + y;
    case '-': return x - y;
    case '*': return x * y;
    case '/': return x / y;
    case '>': return x > y;
    case 'g': return x >= y;
    case '<': return x < y;
    case 'l': return x <= y;
    case '=': return x == y;
    case 'M': return x > y || isnan(x) ? x : y;
    default: return x < y || isnan(x) ? x : y;
  }
}

void st_binary(char op, const void* a, const void* b, void* out, int64_t rows, int64_t cols) {
  for (size_t i = 0; i < st_size(rows, cols); ++i) {
    ((half*)out)[i] = (half)binary(op, ((const half*)a)[i], ((const half*)b)[i]);
  }
}

static float unary(char op, float x) {
  switch (op) {
    case 'n': return -x;
    case 'e': return expf(x);
    case 'l': return logf(x);
    case 's': return sqrtf(x);
    case 'R': return 1 / sqrtf(x);
    case 't': return tanhf(x);
    case 'g': return 1 / (1 + expf(-x));
    case 'r': return x > 0 || isnan(x) ? x : 0;
    case 'G': return 0.5f * x * (1 + erff(x * 0.70710678f));
    case 'S': return x / (1 + expf(-x));
    default: return fabsf(x);
  }
}

void st_unary(char op, const void* a, void* out, int64_t rows, int64_t cols) {
  for (size_t i = 0; i < st_size(rows, cols); ++i) ((half*)out)[i] = (half)unary(op, ((const half*)a)[i]);
}

void st_matmul(const void* a, const void* b, void* out, int64_t m, int64_t k, int64_t n) {
  const half *x = a, *y = b;
  memset(out, 0, st_size(m, n) * sizeof(half));
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      float sum = 0;
      for (int64_t q = 0; q < k; ++q) sum += (float)x[place(m, i, q)] * (float)y[place(k, q, j)];
      ((half*)out)[place(m, i, j)] = (half)sum;
    }
  }
}

void st_reduce(char op, const void* a, void* out, int64_t rows, int64_t cols) {
  memset(out, 0, st_size(rows, 1) * sizeof(half));
  for (int64_t r = 0; r < rows; ++r) {
    float made = op == '+' ? 0 : -INFINITY;
    for (int64_t c = 0; c < cols; ++c) made = binary(op, ((const half*)a)[place(rows, r, c)], made);
    ((half*)out)[place(rows, r, 0)] = (half)made;
  }
}

void st_softmax(const void* a, void* out, int64_t rows, int64_t cols) {
  const half* in = a;
  for (int64_t r = 0; r < rows; ++r) {
    float most = -INFINITY, sum = 0;
    for (int64_t c = 0; c < cols; ++c) most = fmaxf(most, in[place(rows, r, c)]);
    for (int64_t c = 0; c < cols; ++c) sum += expf((float)in[place(rows, r, c)] - most);
    for (int64_t c = 0; c < cols; ++c) {
      ((half*)out)[place(rows, r, c)] = (half)(expf((float)in[place(rows, r, c)] - most) / sum);
    }
  }
}
