// quantise_int8, quantise_fp8, lift.
#include "activations.h"

#include <limits>

#include "slidesparse.h"

namespace shiplap::slidesparse {
namespace {

constexpr float kMinScale = 0x1p-110f;
constexpr int64_t kSerial = 200000;  // elements that one thread does faster than two start

// Quantises a row that is already float; returns its scale.
float quantise_row(const Kernels& kernels, const float* row, int64_t k, bool float8, uint8_t* q) {
  const float largest = kernels.largest(row, k);
  if (!(largest <= std::numeric_limits<float>::max())) {  // an infinity or NaN
    std::fill_n(q, k, uint8_t{0});
    return std::numeric_limits<float>::quiet_NaN();
  }
  const float scale = std::max(largest / (float8 ? 448.0f : 127.0f), kMinScale);
  const Quantise task{row, k, 1.0f / scale, q};
  float8 ? kernels.to_float8(task) : kernels.to_int8(task);
  return scale;
}

}  // namespace

void quantise_rows(const Kernels& kernels, const Activations& a, int64_t depth, int threads, char* rooms, uint8_t* q,
                   float* scale) {
  const int64_t room = quantise_room(a.k);
  parallel_for(a.rows * a.k < kSerial ? 1 : threads, a.rows, [&](int worker, int64_t row) {
    float* floats = reinterpret_cast<float*>(rooms + worker * room);
    uint8_t* narrow = reinterpret_cast<uint8_t*>(rooms + worker * room + round_up(4 * a.k, 64));
    const char* from = a.x + (a.order ? a.order[row] : row) * a.k * a.itemsize;
    if (a.element != kFloat32) kernels.widen[a.element](from, floats, a.k);
    const float* wide = a.element == kFloat32 ? reinterpret_cast<const float*>(from) : floats;
    if (a.pairs == 0) {
      scale[row] = quantise_row(kernels, wide, a.k, a.float8, q + row * depth);
      return;
    }
    scale[row] = quantise_row(kernels, wide, a.k, a.float8, narrow);
    std::memset(narrow + a.k, 0, 16);
    lift_row(narrow, a.k, a.pairs, q + row * depth, depth);
  });
}

namespace {

int check_activations(const sl_context* ctx, const DLTensor* x, int64_t pairs, const DLTensor* out) {
  SL_TRY(check_layout(ctx, "x", x, 2));
  if (element_of(dtype_of(x)) < 0) return fail(ctx, SL_UNSUPPORTED, "x is of no floating dtype that this kernel knows");
  if (pairs < 2 || pairs > 8) {
    return fail(ctx, SL_INVALID_ARGUMENT, "%lld pairs, expected 2 to 8", static_cast<long long>(pairs));
  }
  SL_TRY(check_layout(ctx, "the output", out, 2));
  SL_TRY(check_extent(ctx, "the output", out, 0, round_up(x->shape[0], 16)));
  return check_extent(ctx, "the output", out, 1, lifted_depth(x->shape[1], pairs));
}

int quantise(const sl_context* ctx, const DLTensor* x, DLTensor* q, DLTensor* scale, int64_t pairs, bool float8) {
  SL_TRY(check_activations(ctx, x, pairs, q));
  SL_TRY(check_tensor(ctx, "q", q, 2, float8 ? Dtype{10, 8} : kInt8Type));
  SL_TRY(check_tensor(ctx, "scale", scale, 1, kFloatType));
  SL_TRY(check_extent(ctx, "scale", scale, 0, q->shape[0]));
  const int64_t m = x->shape[0], k = x->shape[1], depth = q->shape[1];
  const int threads = thread_count(ctx);
  SL_TRY(Arena::require(ctx, threads * quantise_room(k)));
  Arena arena(ctx);
  const Activations a{data<const char>(x), m, k, x->dtype.bits / 8, element_of(dtype_of(x)), pairs, float8};
  uint8_t* bytes = data<uint8_t>(q);
  float* scales = data<float>(scale);
  quantise_rows(best_kernels(), a, depth, threads, arena.take<char>(threads * quantise_room(k)), bytes, scales);
  std::fill_n(bytes + m * depth, (q->shape[0] - m) * depth, uint8_t{0});
  std::fill(scales + m, scales + q->shape[0], 1.0f);
  return SL_OK;
}

template <class T>
void lift_rows(const DLTensor* x, DLTensor* out, int64_t pairs, int threads) {
  const int64_t m = x->shape[0], k = x->shape[1], depth = out->shape[1], whole = k / (2 * pairs) * 2 * pairs;
  const T* from = data<const T>(x);
  T* to = data<T>(out);
  parallel_for(m * k < kSerial ? 1 : threads, m, [&](int, int64_t row) {
    T last[16] = {};  // the group that k cuts short
    T* next = to + row * depth;
    lift_row(from + row * k, whole, pairs, next, depth);
    std::copy(from + row * k + whole, from + (row + 1) * k, last);
    if (whole < k) {
      next += whole / (2 * pairs) * 4 * (pairs - 1);
      lift_row(last, k - whole, pairs, next, 4 * (pairs - 1));
    }
  });
  std::fill(to + m * depth, to + out->shape[0] * depth, T{});
}

}  // namespace
}  // namespace shiplap::slidesparse

// Workspace: threads * (cdiv(k, 16) * 64 + cdiv(k + 16, 64) * 64)
extern "C" int slidesparse_quantise_int8(const sl_context* ctx, const DLTensor* x, DLTensor* q, DLTensor* scale,
                                         int64_t pairs) {
  return shiplap::guarded(ctx, [&] { return shiplap::slidesparse::quantise(ctx, x, q, scale, pairs, false); });
}

// Workspace: as slidesparse_quantise_int8
extern "C" int slidesparse_quantise_fp8(const sl_context* ctx, const DLTensor* x, DLTensor* q, DLTensor* scale,
                                        int64_t pairs) {
  return shiplap::guarded(ctx, [&] { return shiplap::slidesparse::quantise(ctx, x, q, scale, pairs, true); });
}

extern "C" int slidesparse_lift(const sl_context* ctx, const DLTensor* x, DLTensor* out, int64_t pairs) {
  using namespace shiplap;
  using namespace shiplap::slidesparse;
  return guarded(ctx, [&] {
    SL_TRY(check_activations(ctx, x, pairs, out));
    if (!(dtype_of(x) == dtype_of(out))) return fail(ctx, SL_INVALID_ARGUMENT, "the output is not of x's dtype");
    const int threads = thread_count(ctx);
    switch (x->dtype.bits) {
      case 8: lift_rows<uint8_t>(x, out, pairs, threads); break;
      case 16: lift_rows<uint16_t>(x, out, pairs, threads); break;
      case 32: lift_rows<uint32_t>(x, out, pairs, threads); break;
      default: lift_rows<uint64_t>(x, out, pairs, threads); break;
    }
    return static_cast<int>(SL_OK);
  });
}
