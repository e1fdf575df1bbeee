// linear_* and experts_*: quantise, multiply, scale and add, without a pass of their own.
#include "activations.h"
#include "numbers.h"
#include "slidesparse.h"
#include "weights.h"

namespace shiplap::slidesparse {
namespace {

struct Layer {
  const DLTensor *x, *scale, *dense, *packed, *bias;
  DLTensor* out;
  int64_t pairs, layout;
  bool slide;  // what the config asks for; what is there decides first
  const DLTensor* chosen = nullptr;  // the expert of each row, whose rows of the dense weight it is multiplied with
  int64_t experts = 1;
  int64_t n() const { return out->shape[1]; }
  bool sparse() const { return packed != nullptr && (slide || dense == nullptr); }
  int64_t depth() const { return sparse() ? lifted_depth(x->shape[1], pairs) : x->shape[1]; }
};

bool asks_slide(const sl_context* ctx) { return ctx->config_size > 0 && ctx->config[0] != 0; }

int check_layer(const sl_context* ctx, const Layer& layer) {
  SL_TRY(check_layout(ctx, "x", layer.x, 2));
  SL_TRY(check_tensor(ctx, "the output", layer.out, 2, dtype_of(layer.x)));
  SL_TRY(check_extent(ctx, "the output", layer.out, 0, layer.x->shape[0]));
  if (layer.dense == nullptr && layer.packed == nullptr) {
    return fail(ctx, SL_INVALID_ARGUMENT, "neither a dense nor a packed weight");
  }
  if (layer.pairs < 2 || layer.pairs > 8) {
    return fail(ctx, SL_INVALID_ARGUMENT, "%lld pairs, expected 2 to 8", static_cast<long long>(layer.pairs));
  }
  if (layer.bias == nullptr) return SL_OK;
  SL_TRY(check_tensor(ctx, "bias", layer.bias, 1, dtype_of(layer.x)));
  return check_extent(ctx, "bias", layer.bias, 0, layer.n());
}

template <class T>
int weight_of(const sl_context* ctx, const Layer& layer, Dtype dtype, Weight<T>* weight) {
  if (layer.dense != nullptr && !layer.sparse()) {
    return dense_weight(ctx, layer.dense, layer.experts * layer.n(), layer.x->shape[1], dtype, weight);
  }
  return packed_weight(ctx, layer.packed, layer.layout, round_up(layer.n(), 32), layer.depth(), dtype, weight);
}

// Sums to the output's elements: scaled, the bias added.
template <class S>
struct Finish {
  const float *row_scale, *column_scale;
  const S* bias;
  S* out;
  int64_t n;
  const int64_t* order = nullptr;  // where a row belongs, if not at its own place

  template <class Sum>
  void operator()(int64_t row, int64_t column, int64_t high, int64_t wide, const Sum* sums) const {
    for (int64_t r = 0; r < high; ++r, sums += kTileColumns) {
      S* to = out + (order ? order[row + r] : row + r) * n + column;
      if (wide == kTileColumns) {  // a width that the compiler knows, for loops of vectors
        write_row(row + r, column, kTileColumns, sums, to);
      } else {
        write_row(row + r, column, wide, sums, to);
      }
    }
  }

 private:
  template <class Sum>
  [[gnu::always_inline]] void write_row(int64_t row, int64_t column, int64_t wide, const Sum* sums, S* to) const {
    float values[kTileColumns];
    for (int64_t c = 0; c < wide; ++c) values[c] = static_cast<float>(sums[c]);
    if (row_scale != nullptr) {
      for (int64_t c = 0; c < wide; ++c) values[c] = values[c] * row_scale[row] * column_scale[column + c];
    }
    if (bias != nullptr) {
      for (int64_t c = 0; c < wide; ++c) values[c] += widen(bias[column + c]);
    }
    for (int64_t c = 0; c < wide; ++c) narrow(values[c], to + c);
  }
};

// Scratch of a quantised layer: rows as bytes, their scales, rows being quantised, for float8 rows and blocks as floats,
// and the order of the rows by expert.
int64_t quantised_room(const Layer& layer, int threads, bool float8) {
  const int64_t m = layer.x->shape[0], depth = layer.depth();
  const int64_t product = float8 ? round_up(4 * threads * kBlock * depth, 64) + 4 * m * depth + 64
                                 : int8_room(m, depth, threads);
  return round_up(m * depth, 64) + round_up(4 * m, 64) + threads * quantise_room(layer.x->shape[1]) + product +
         (layer.chosen ? round_up(8 * m, 64) + round_up(8 * (layer.experts + 1), 64) : 0);
}

// `order` gets the numbers of the rows, those of an expert together: from start[expert] to start[expert + 1].
void group_rows(const int64_t* chosen, int64_t m, int64_t experts, int64_t* start, int64_t* order) {
  const auto known = [&](int64_t row) { return chosen[row] >= 0 && chosen[row] < experts; };
  std::fill(start, start + experts + 1, int64_t{0});
  for (int64_t row = 0; row < m; ++row) {
    if (known(row)) ++start[chosen[row] + 1];
  }
  for (int64_t e = 0; e < experts; ++e) start[e + 1] += start[e];
  for (int64_t row = 0; row < m; ++row) {
    if (known(row)) order[start[chosen[row]]++] = row;
  }
  std::copy_backward(start, start + experts, start + experts + 1);  // each had moved to the next one's place
  start[0] = 0;
}

template <class S>
int quantised_layer(const sl_context* ctx, const Layer& layer, bool float8) {
  const int64_t m = layer.x->shape[0], k = layer.x->shape[1], depth = layer.depth();
  const int threads = thread_count(ctx);
  const Kernels& kernels = best_kernels();
  SL_TRY(Arena::require(ctx, quantised_room(layer, threads, float8)));
  Arena arena(ctx);
  uint8_t* q = arena.take<uint8_t>(m * depth);
  float* row_scale = arena.take<float>(m);
  int64_t rows = m, all[2] = {0, m}, *start = all, *order = nullptr;
  if (layer.chosen != nullptr) {
    order = arena.take<int64_t>(m);
    start = arena.take<int64_t>(layer.experts + 1);
    group_rows(data<const int64_t>(layer.chosen), m, layer.experts, start, order);
    rows = start[layer.experts];
    if (rows < m) std::fill_n(data<S>(layer.out), m * layer.n(), S{});  // rows of no expert
  }
  const Activations activations{data<const char>(layer.x), rows, k, layer.x->dtype.bits / 8,
                                element_of(dtype_of(layer.x)), layer.sparse() ? layer.pairs : 0, float8, order};
  quantise_rows(kernels, activations, depth, threads, arena.take<char>(threads * quantise_room(k)), q, row_scale);
  const auto finish_of = [&](int64_t expert) {
    return Finish<S>{row_scale + start[expert], data<const float>(layer.scale) + expert * layer.n(),
                     layer.bias ? data<const S>(layer.bias) : nullptr, data<S>(layer.out), layer.n(),
                     order ? order + start[expert] : nullptr};
  };
  const auto product = [&](const auto* left, const auto& weight, const auto& multiplied) {
    for (int64_t expert = 0; expert < layer.experts; ++expert) {
      const int64_t count = start[expert + 1] - start[expert];
      if (count == 0) continue;
      multiplied(left + start[expert] * depth, count, weight.from_row(expert * layer.n()), finish_of(expert));
    }
    return static_cast<int>(SL_OK);
  };
  if (!float8) {
    Weight<int8_t> weight;
    SL_TRY(weight_of(ctx, layer, kInt8Type, &weight));
    const auto multiplied = [&](const auto* left, int64_t count, const auto& part, const auto& finish) {
      multiply_int8(kernels, left, count, part, layer.n(), threads, arena, finish);
    };
    return product(reinterpret_cast<const int8_t*>(q), weight, multiplied);
  }
  Weight<float> weight;
  SL_TRY(weight_of(ctx, layer, kFloat8Type, &weight));
  float* rooms = arena.take<float>(threads * kBlock * depth);
  float* wide = arena.take<float>(m * depth);
  kernels.widen[kFloat8](q, wide, rows * depth);
  const auto multiplied = [&](const auto* left, int64_t count, const auto& part, const auto& finish) {
    multiply(kernels.dot_float, left, count, part, layer.n(), threads, rooms, finish);
  };
  return product(static_cast<const float*>(wide), weight, multiplied);
}

int quantised(const sl_context* ctx, const Layer& layer, bool float8) {
  SL_TRY(check_layer(ctx, layer));
  SL_TRY(check_tensor(ctx, "scale", layer.scale, 1, kFloatType));
  SL_TRY(check_extent(ctx, "scale", layer.scale, 0, layer.experts * layer.n()));
  if (layer.chosen != nullptr) {
    SL_TRY(check_tensor(ctx, "chosen", layer.chosen, 1, Dtype{0, 64}));
    SL_TRY(check_extent(ctx, "chosen", layer.chosen, 0, layer.x->shape[0]));
    if (layer.experts < 1) return fail(ctx, SL_INVALID_ARGUMENT, "no experts");
  }
  if (!float8 && layer.x->shape[1] > 65536) return fail(ctx, SL_INVALID_ARGUMENT, "sums of so great a depth leave int32");
  switch (element_of(dtype_of(layer.x))) {
    case kFloat32: return quantised_layer<float>(ctx, layer, float8);
    case kBfloat16: return quantised_layer<Bfloat16>(ctx, layer, float8);
    case kFloat16: return quantised_layer<Half>(ctx, layer, float8);
    default: return fail(ctx, SL_UNSUPPORTED, "x is neither float32 nor one of the 16-bit dtypes");
  }
}

template <class S>
int plain(const sl_context* ctx, const Layer& layer, int64_t n, Dtype dtype) {
  SL_TRY(check_layer(ctx, layer));
  SL_TRY(check_tensor(ctx, "x", layer.x, 2, dtype));
  SL_TRY(check_extent(ctx, "the output", layer.out, 1, n));
  const int64_t m = layer.x->shape[0], k = layer.x->shape[1], depth = layer.depth();
  const int threads = thread_count(ctx);
  Weight<float> weight;
  SL_TRY(weight_of(ctx, layer, dtype, &weight));
  SL_TRY(Arena::require(ctx, 4 * (m * (depth + k + 16) + threads * kBlock * depth) + 192));
  Arena arena(ctx);
  const Kernels& kernels = best_kernels();
  float* wide = arena.take<float>(m * k + 16);
  kernels.widen[element_of(dtype)](data<const void>(layer.x), wide, m * k);
  const float* left = wide;
  if (layer.sparse()) {
    float* lifted = arena.take<float>(m * depth);
    for (int64_t row = 0; row < m; ++row) {
      const int64_t whole = k / (2 * layer.pairs) * 2 * layer.pairs, done = whole / (2 * layer.pairs) * 4 * (layer.pairs - 1);
      float last[16] = {};
      std::copy(wide + row * k + whole, wide + (row + 1) * k, last);
      lift_row(wide + row * k, whole, layer.pairs, lifted + row * depth, depth);
      if (whole < k) lift_row(last, k - whole, layer.pairs, lifted + row * depth + done, 4 * (layer.pairs - 1));
    }
    left = lifted;
  }
  float* rooms = arena.take<float>(threads * kBlock * depth);
  const Finish<S> finish{nullptr, nullptr, layer.bias ? data<const S>(layer.bias) : nullptr, data<S>(layer.out), n};
  multiply(kernels.dot_float, left, m, weight, n, threads, rooms, finish);
  return SL_OK;
}

}  // namespace
}  // namespace shiplap::slidesparse

using namespace shiplap;
using namespace shiplap::slidesparse;

extern "C" int slidesparse_linear_int8(const sl_context* ctx, const DLTensor* x, const DLTensor* scale,
                                       const DLTensor* dense, const DLTensor* packed, const DLTensor* bias,
                                       DLTensor* out, int64_t pairs, int64_t layout) {
  const Layer layer{x, scale, dense, packed, bias, out, pairs, layout, asks_slide(ctx)};
  return guarded(ctx, [&] { return quantised(ctx, layer, false); });
}

extern "C" int slidesparse_linear_fp8(const sl_context* ctx, const DLTensor* x, const DLTensor* scale,
                                      const DLTensor* dense, const DLTensor* packed, const DLTensor* bias,
                                      DLTensor* out, int64_t pairs, int64_t layout) {
  const Layer layer{x, scale, dense, packed, bias, out, pairs, layout, asks_slide(ctx)};
  return guarded(ctx, [&] { return quantised(ctx, layer, true); });
}

extern "C" int slidesparse_experts_int8(const sl_context* ctx, const DLTensor* x, const DLTensor* chosen,
                                        const DLTensor* scale, const DLTensor* weight, DLTensor* out, int64_t experts) {
  const Layer layer{x, scale, weight, nullptr, nullptr, out, 2, kPortable, false, chosen, experts};
  return guarded(ctx, [&] { return quantised(ctx, layer, false); });
}

extern "C" int slidesparse_experts_fp8(const sl_context* ctx, const DLTensor* x, const DLTensor* chosen,
                                       const DLTensor* scale, const DLTensor* weight, DLTensor* out, int64_t experts) {
  const Layer layer{x, scale, weight, nullptr, nullptr, out, 2, kPortable, false, chosen, experts};
  return guarded(ctx, [&] { return quantised(ctx, layer, true); });
}

extern "C" int slidesparse_linear_bf16(const sl_context* ctx, const DLTensor* x, const DLTensor* dense,
                                       const DLTensor* packed, const DLTensor* bias, DLTensor* out, int64_t n,
                                       int64_t pairs, int64_t layout) {
  const Layer layer{x, nullptr, dense, packed, bias, out, pairs, layout, asks_slide(ctx)};
  return guarded(ctx, [&] { return plain<Bfloat16>(ctx, layer, n, kBfloat16Type); });
}

extern "C" int slidesparse_linear_fp16(const sl_context* ctx, const DLTensor* x, const DLTensor* dense,
                                       const DLTensor* packed, const DLTensor* bias, DLTensor* out, int64_t n,
                                       int64_t pairs, int64_t layout) {
  const Layer layer{x, nullptr, dense, packed, bias, out, pairs, layout, asks_slide(ctx)};
  return guarded(ctx, [&] { return plain<Half>(ctx, layer, n, kFloat16Type); });
}
