// mm_int8, mm_fp8, sparse_mm_*: products of operands that are padded to whole tiles.
#include "numbers.h"
#include "operands.h"
#include "slidesparse.h"
#include "weights.h"

namespace shiplap::slidesparse {
namespace {

int check_left(const sl_context* ctx, const char* name, const DLTensor* left, Dtype dtype, const DLTensor* out) {
  SL_TRY(check_tensor(ctx, name, left, 2, dtype));
  SL_TRY(check_layout(ctx, "the output", out, 2));
  return check_extent(ctx, "the output", out, 0, left->shape[0]);
}

int product_int8(const sl_context* ctx, const DLTensor* q, const Weight<int8_t>& weight, DLTensor* out) {
  SL_TRY(check_tensor(ctx, "the output", out, 2, kInt32Type));
  if (weight.depth > 131040) return fail(ctx, SL_INVALID_ARGUMENT, "sums of so great a depth leave int32");
  const int64_t m = q->shape[0], n = out->shape[1];
  const int threads = thread_count(ctx);
  SL_TRY(Arena::require(ctx, int8_room(m, weight.depth, threads)));
  int32_t* to = data<int32_t>(out);
  multiply_int8(best_kernels(), data<const int8_t>(q), m, weight, n, threads, Arena(ctx),
                [&](int64_t row, int64_t column, int64_t high, int64_t wide, const int32_t* sums) {
                  for (int64_t r = 0; r < high; ++r) {
                    std::copy_n(sums + r * kTileColumns, wide, to + (row + r) * n + column);
                  }
                });
  return SL_OK;
}

// out = product * row_scale[:, None] * column_scale, either of which may be NULL for ones.
template <class S>
int product_float(const sl_context* ctx, const DLTensor* left, const Weight<float>& weight, const float* row_scale,
                  const float* column_scale, DLTensor* out) {
  const int64_t m = left->shape[0], n = out->shape[1], depth = weight.depth;
  const int threads = thread_count(ctx);
  SL_TRY(Arena::require(ctx, 4 * (m + threads * kBlock) * depth + 64));
  Arena arena(ctx);
  float* wide_left = arena.take<float>(m * depth);
  float* rooms = arena.take<float>(threads * kBlock * depth);
  const Kernels& kernels = best_kernels();
  kernels.widen[element_of(dtype_of(left))](data<const void>(left), wide_left, m * depth);
  S* to = data<S>(out);
  multiply(kernels.dot_float, static_cast<const float*>(wide_left), m, weight, n, threads, rooms,
           [&](int64_t row, int64_t column, int64_t high, int64_t wide, const float* sums) {
             for (int64_t r = 0; r < high; ++r) {
               for (int64_t c = 0; c < wide; ++c) {
                 float value = sums[r * kTileColumns + c];
                 if (row_scale != nullptr) value *= row_scale[row + r];
                 if (column_scale != nullptr) value *= column_scale[column + c];
                 narrow(value, to + (row + r) * n + column + c);
               }
             }
           });
  return SL_OK;
}

template <class S>
int sparse_float(const sl_context* ctx, const char* name, const DLTensor* x, const DLTensor* packed, DLTensor* out,
                 int64_t n, int64_t layout, Dtype dtype, Dtype result) {
  SL_TRY(check_left(ctx, name, x, dtype, out));
  SL_TRY(check_tensor(ctx, "the output", out, 2, result));
  SL_TRY(check_extent(ctx, "the output", out, 1, n));
  Weight<float> weight;
  SL_TRY(packed_weight(ctx, packed, layout, n, x->shape[1], dtype, &weight));
  return product_float<S>(ctx, x, weight, nullptr, nullptr, out);
}

}  // namespace
}  // namespace shiplap::slidesparse

using namespace shiplap;
using namespace shiplap::slidesparse;

// Workspace: threads * 16 * (2 * k + 31) + min(m, 256) * (3 * k + 101) + 320
extern "C" int slidesparse_mm_int8(const sl_context* ctx, const DLTensor* q, const DLTensor* weight, DLTensor* out) {
  return guarded(ctx, [&] {
    SL_TRY(check_left(ctx, "q", q, kInt8Type, out));
    Weight<int8_t> rows;
    SL_TRY(dense_weight(ctx, weight, out->shape[1], q->shape[1], kInt8Type, &rows));
    return product_int8(ctx, q, rows, out);
  });
}

// Workspace: 4 * (m + threads * 16) * k + 64
extern "C" int slidesparse_mm_fp8(const sl_context* ctx, const DLTensor* q, const DLTensor* weight,
                                  const DLTensor* scale_q, const DLTensor* scale_weight, DLTensor* out) {
  return guarded(ctx, [&] {
    SL_TRY(check_left(ctx, "q", q, kFloat8Type, out));
    SL_TRY(check_tensor(ctx, "the output", out, 2, kBfloat16Type));
    SL_TRY(check_tensor(ctx, "scale_q", scale_q, 1, kFloatType));
    SL_TRY(check_extent(ctx, "scale_q", scale_q, 0, out->shape[0]));
    SL_TRY(check_tensor(ctx, "scale_weight", scale_weight, 1, kFloatType));
    SL_TRY(check_extent(ctx, "scale_weight", scale_weight, 0, out->shape[1]));
    Weight<float> rows;
    SL_TRY(dense_weight(ctx, weight, out->shape[1], q->shape[1], kFloat8Type, &rows));
    return product_float<Bfloat16>(ctx, q, rows, data<const float>(scale_q), data<const float>(scale_weight), out);
  });
}

// Workspace: as slidesparse_mm_int8
extern "C" int slidesparse_sparse_mm_int8(const sl_context* ctx, const DLTensor* q, const DLTensor* packed,
                                          DLTensor* out, int64_t n, int64_t layout) {
  return guarded(ctx, [&] {
    SL_TRY(check_left(ctx, "q", q, kInt8Type, out));
    SL_TRY(check_extent(ctx, "the output", out, 1, n));
    Weight<int8_t> weight;
    SL_TRY(packed_weight(ctx, packed, layout, n, q->shape[1], kInt8Type, &weight));
    return product_int8(ctx, q, weight, out);
  });
}

// Workspace: 4 * (m + threads * 16) * k + 64
extern "C" int slidesparse_sparse_mm_fp8(const sl_context* ctx, const DLTensor* q, const DLTensor* packed,
                                         DLTensor* out, int64_t n, int64_t layout) {
  return guarded(ctx, [&] {
    return sparse_float<Bfloat16>(ctx, "q", q, packed, out, n, layout, kFloat8Type, kBfloat16Type);
  });
}

// Workspace: 4 * (m + threads * 16) * k + 64
extern "C" int slidesparse_sparse_mm_bf16(const sl_context* ctx, const DLTensor* x, const DLTensor* packed,
                                          DLTensor* out, int64_t n, int64_t layout) {
  return guarded(ctx, [&] { return sparse_float<Bfloat16>(ctx, "x", x, packed, out, n, layout, kBfloat16Type, kBfloat16Type); });
}

// Workspace: 4 * (m + threads * 16) * k + 64
extern "C" int slidesparse_sparse_mm_fp16(const sl_context* ctx, const DLTensor* x, const DLTensor* packed,
                                          DLTensor* out, int64_t n, int64_t layout) {
  return guarded(ctx, [&] { return sparse_float<Half>(ctx, "x", x, packed, out, n, layout, kFloat16Type, kFloat16Type); });
}
