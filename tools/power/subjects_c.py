"""Kernels in C. Each is compiled by itself, against the header of its declaration."""

from __future__ import annotations

from subjects import Subject

__all__ = ["SUBJECTS"]

SUBJECTS = (
    Subject(
        "c_mm",
        '@sl.op("NS::mm")\ndef op(a: Float32[Tensor, "m k"], b: Float32[Tensor, "k n"]) -> Float32[Tensor, "m n"]:\n'
        "    return a @ b\n",
        """
int kernel(const sl_context* ctx, const DLTensor* a, const DLTensor* b, DLTensor* out) {
  const float *A = a->data, *B = b->data;
  float* C = out->data;
  const int64_t m = a->shape[0], k = a->shape[1], n = b->shape[1];
  for (int64_t i = 0; i < m * n; ++i) C[i] = 0;
  for (int64_t i0 = 0; i0 < m; i0 += 32)
    for (int64_t p0 = 0; p0 < k; p0 += 64) {
      const int64_t i1 = i0 + 32 < m ? i0 + 32 : m;
      const int64_t p1 = p0 + 64 < k ? p0 + 64 : k;
      for (int64_t i = i0; i < i1; ++i)
        for (int64_t p = p0; p < p1; ++p)
          for (int64_t j = 0; j < n; ++j) C[i * n + j] += A[i * k + p] * B[p * n + j];
    }
  return SL_OK;
}
""",
        language="c",
    ),
    Subject(
        "c_row_norm",
        '@sl.op("NS::row_norm", requires=("c >= 1",))\ndef op(x: Float32[Tensor, "n c"], w: Float32[Tensor, "c"], '
        'eps: float = 1e-5) -> Float32[Tensor, "n c"]:\n    y = x.double() - x.double().mean(1, keepdim=True)\n'
        "    return (y * torch.rsqrt(y.square().mean(1, keepdim=True) + eps) * w).float()\n",
        """
#include <math.h>
int kernel(const sl_context* ctx, const DLTensor* x, const DLTensor* w, DLTensor* out, double eps) {
  const float *from = x->data, *weight = w->data;
  float* to = out->data;
  const int64_t n = x->shape[0], c = x->shape[1];
  for (int64_t i = 0; i < n; ++i) {
    const float* row = from + i * c;
    double total = 0, squares = 0;
    for (int64_t j = 0; j < c; ++j) total += row[j];
    const double mean = total / c;
    for (int64_t j = 0; j < c; ++j) squares += (row[j] - mean) * (row[j] - mean);
    const double scale = 1 / sqrt(squares / c + eps);
    for (int64_t j = 0; j < c; ++j) to[i * c + j] = (float)((row[j] - mean) * scale * weight[j]);
  }
  return SL_OK;
}
""",
        language="c",
    ),
    Subject(
        "c_softmax",
        '@sl.op("NS::softmax", requires=("c >= 1",))\ndef op(x: Float32[Tensor, "n c"], scale: float = 1.0) '
        '-> Float32[Tensor, "n c"]:\n    return torch.softmax(x * scale, 1)\n',
        """
#include <math.h>
int kernel(const sl_context* ctx, const DLTensor* x, DLTensor* out, double scale) {
  const float* from = x->data;
  float* to = out->data;
  const int64_t n = x->shape[0], c = x->shape[1];
  for (int64_t i = 0; i < n; ++i) {
    double top = from[i * c] * scale, total = 0;
    for (int64_t j = 1; j < c; ++j) {
      const double value = from[i * c + j] * scale;
      if (value > top || value != value) top = value;
    }
    for (int64_t j = 0; j < c; ++j) {
      const double weight = exp(from[i * c + j] * scale - top);
      to[i * c + j] = (float)weight;
      total += weight;
    }
    for (int64_t j = 0; j < c; ++j) to[i * c + j] = (float)(to[i * c + j] / total);
  }
  return SL_OK;
}
""",
        language="c",
    ),
    Subject(
        "c_scatter",
        '@sl.op("NS::scatter", requires=("bins >= 1",))\ndef op(x: Float32[Tensor, "n c"], index: Int64[Tensor, "n"], '
        'bins: int = 5) -> Float32[Tensor, "bins c"]:\n'
        "    return x.new_zeros(bins, x.shape[1]).index_add(0, index % bins, x)\n",
        """
int kernel(const sl_context* ctx, const DLTensor* x, const DLTensor* index, DLTensor* out, int64_t bins) {
  const float* from = x->data;
  const int64_t* where = index->data;
  float* to = out->data;
  const int64_t n = x->shape[0], c = x->shape[1];
  for (int64_t i = 0; i < bins * c; ++i) to[i] = 0;
  for (int64_t i = 0; i < n; ++i) {
    int64_t bin = where[i] % bins;
    if (bin < 0) bin += bins;
    for (int64_t j = 0; j < c; ++j) to[bin * c + j] += from[i * c + j];
  }
  return SL_OK;
}
""",
        language="c",
    ),
    Subject(
        "c_stencil",
        '@sl.op("NS::stencil", requires=("h >= 1", "w >= 1"))\ndef op(x: Float32[Tensor, "h w"], centre: float = 4.0) '
        '-> Float32[Tensor, "h w"]:\n    p = F.pad(x, (1, 1, 1, 1))\n'
        "    return centre * x - p[:-2, 1:-1] - p[2:, 1:-1] - p[1:-1, :-2] - p[1:-1, 2:]\n",
        """
int kernel(const sl_context* ctx, const DLTensor* x, DLTensor* out, double centre) {
  const float* from = x->data;
  float* to = out->data;
  const int64_t h = x->shape[0], w = x->shape[1];
  for (int64_t i = 0; i < h; ++i)
    for (int64_t j = 0; j < w; ++j) {
      float sum = (float)centre * from[i * w + j];
      if (i > 0) sum -= from[(i - 1) * w + j];
      if (i < h - 1) sum -= from[(i + 1) * w + j];
      if (j > 0) sum -= from[i * w + j - 1];
      if (j < w - 1) sum -= from[i * w + j + 1];
      to[i * w + j] = sum;
    }
  return SL_OK;
}
""",
        language="c",
    ),
    Subject(
        "c_strided_sum",
        '@sl.op("NS::strided_sum")\ndef op(x: Float32[Tensor, "n c"], y: Float32[Tensor, "n c"]) '
        '-> Float32[Tensor, "c"]:\n    return (x.double() * y.double()).sum(0).float()\n',
        """
int kernel(const sl_context* ctx, const DLTensor* x, const DLTensor* y, DLTensor* out) {
  const float *A = x->data, *B = y->data;
  float* to = out->data;
  const int64_t n = x->shape[0], c = x->shape[1];
  for (int64_t j = 0; j < c; ++j) {
    double lanes[4] = {0, 0, 0, 0};
    int64_t i = 0;
    for (; i + 4 <= n; i += 4)
      for (int64_t k = 0; k < 4; ++k)
        lanes[k] += (double)A[(i + k) * x->strides[0] + j * x->strides[1]] *
                    B[(i + k) * y->strides[0] + j * y->strides[1]];
    for (; i < n; ++i)
      lanes[0] += (double)A[i * x->strides[0] + j * x->strides[1]] * B[i * y->strides[0] + j * y->strides[1]];
    to[j] = (float)(lanes[0] + lanes[1] + lanes[2] + lanes[3]);
  }
  return SL_OK;
}
""",
        language="c",
        strided=("x", "y"),
    ),
    Subject(
        "c_threads",
        '@sl.op("NS::threads")\ndef op(x: Float32[Tensor, "n c"]) -> Float32[Tensor, "c"]:\n'
        "    return x.double().sum(0).float()\n",
        """
#include <pthread.h>
typedef struct {
  const float* from;
  double* total;
  int64_t first, last, c;
  pthread_mutex_t* lock;
} share;
static void* add_up(void* given) {
  share* s = given;
  for (int64_t i = s->first; i < s->last; ++i) {
    pthread_mutex_lock(s->lock);
    for (int64_t j = 0; j < s->c; ++j) s->total[j] += s->from[i * s->c + j];
    pthread_mutex_unlock(s->lock);
  }
  return NULL;
}
int kernel(const sl_context* ctx, const DLTensor* x, DLTensor* out) {
  const int64_t n = x->shape[0], c = x->shape[1];
  float* to = out->data;
  double* total = calloc((size_t)c + 1, sizeof(double));
  pthread_mutex_t lock;
  pthread_mutex_init(&lock, NULL);
  pthread_t workers[4];
  share shares[4];
  for (int64_t t = 0; t < 4; ++t) {
    shares[t].from = x->data;
    shares[t].total = total;
    shares[t].first = n * t / 4;
    shares[t].last = n * (t + 1) / 4;
    shares[t].c = c;
    shares[t].lock = &lock;
    pthread_create(&workers[t], NULL, add_up, &shares[t]);
  }
  for (int64_t t = 0; t < 4; ++t) pthread_join(workers[t], NULL);
  for (int64_t j = 0; j < c; ++j) to[j] = (float)total[j];
  free(total);
  return SL_OK;
}
""",
        language="c",
    ),
)
