// What torch asks of an accelerator and has no CPU kernel for, or none that serves, made of other
// operators of the device: the cells of LSTM and GRU, histc of integers, pixel_shuffle. A target that has kernels of its own registers
// those, and these are left out (register_stand_ins).
#include <ATen/TensorOperators.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/pixel_shuffle_native.h>
#include <ATen/ops/pixel_unshuffle_native.h>
#include <ATen/ops/sigmoid_backward.h>
#include <ATen/ops/tanh_backward.h>
#include <ATen/ops/zeros_like.h>
#include <shiplap_backend/cells.h>
#include <shiplap_backend/fallback.h>

namespace shiplap::backend {
namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;

bool given(const Optional& t) { return t && t->defined(); }
Tensor biased(const Tensor& t, const Optional& bias) { return given(bias) ? t + *bias : t; }
Tensor or_zeros(const Optional& t, const Tensor& like) {
  return given(t) ? *t : at::zeros_like(like);
}

// --- LSTM: the workspace holds the gates after their functions, as torch orders them.

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input, const Tensor& hidden,
                                             const Tensor& cx, const Optional& input_bias,
                                             const Optional& hidden_bias) {
  auto gates = (biased(input, input_bias) + biased(hidden, hidden_bias)).chunk(4, -1);
  auto in = gates[0].sigmoid(), forget = gates[1].sigmoid();
  auto cell = gates[2].tanh(), out = gates[3].sigmoid();
  auto cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, -1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const Optional& grad_hy,
                                                      const Optional& grad_cy, const Tensor& cx,
                                                      const Tensor& cy, const Tensor& workspace,
                                                      bool has_bias) {
  if (!given(grad_hy) && !given(grad_cy)) {
    return {};
  }
  auto gates = workspace.chunk(4, -1);
  const auto &in = gates[0], &forget = gates[1], &cell = gates[2], &out = gates[3];
  auto squashed = cy.tanh();
  auto gh = or_zeros(grad_hy, cy);
  auto gc = at::tanh_backward(gh * out, squashed) + or_zeros(grad_cy, cy);
  auto grad = at::cat({at::sigmoid_backward(gc * cell, in), at::sigmoid_backward(gc * cx, forget),
                       at::tanh_backward(gc * in, cell), at::sigmoid_backward(gh * squashed, out)},
                      -1);
  return {grad, gc * forget, has_bias ? grad.sum(0) : Tensor()};
}

// --- GRU: the workspace holds reset, update, new, the old state, and the hidden part of `new`.

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input, const Tensor& hidden, const Tensor& hx,
                                    const Optional& input_bias, const Optional& hidden_bias) {
  auto i = biased(input, input_bias).chunk(3, -1), h = biased(hidden, hidden_bias).chunk(3, -1);
  auto reset = (i[0] + h[0]).sigmoid(), update = (i[1] + h[1]).sigmoid();
  auto fresh = (i[2] + h[2] * reset).tanh();
  return {(hx - fresh) * update + fresh, at::cat({reset, update, fresh, hx, h[2]}, -1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad_hy,
                                                                     const Tensor& workspace,
                                                                     bool has_bias) {
  auto kept = workspace.chunk(5, -1);
  const auto &reset = kept[0], &update = kept[1], &fresh = kept[2], &hx = kept[3], &hn = kept[4];
  auto of_update = at::sigmoid_backward(grad_hy * (hx - fresh), update);
  auto of_fresh = at::tanh_backward(grad_hy - grad_hy * update, fresh);
  auto of_reset = at::sigmoid_backward(of_fresh * hn, reset);
  auto of_input = at::cat({of_reset, of_update, of_fresh}, -1);
  auto of_hidden = at::cat({of_reset, of_update, of_fresh * reset}, -1);
  return {of_input, of_hidden, grad_hy * update, has_bias ? of_input.sum(0) : Tensor(),
          has_bias ? of_hidden.sum(0) : Tensor()};
}

// --- histc: accelerators count integers too, and models rely on it; the CPU counts floats only.

Tensor histc_any(const Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  if (!at::isIntegralType(self.scalar_type(), /*includeBool=*/false)) {
    return fallback<at::_ops::histc>::call(Why::unregistered, "", self, bins, min, max);
  }
  return at::histc(self.to(at::kDouble), bins, min, max).to(self.scalar_type());
}

Tensor& histc_out(const Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max,
                  Tensor& out) {
  if (!at::isIntegralType(self.scalar_type(), /*includeBool=*/false)) {
    return fallback<at::_ops::histc_out>::call(Why::unregistered, "", self, bins, min, max, out);
  }
  TORCH_CHECK(out.scalar_type() == self.scalar_type(), "torch.histogram: input tensor and hist tensor should",
              " have the same dtype, but got input ", self.scalar_type(), " and hist ", out.scalar_type());
  auto counts = histc_any(self, bins, min, max);
  at::native::resize_output(out, counts.sizes());
  return out.copy_(counts);
}

// --- torch's composite forgets channels last, which its CPU kernels keep.

Tensor pixel_shuffle(const Tensor& self, int64_t factor) {
  return at::native::math_pixel_shuffle(self, factor).contiguous(self.suggest_memory_format());
}

Tensor pixel_unshuffle(const Tensor& self, int64_t factor) {
  return at::native::math_pixel_unshuffle(self, factor).contiguous(self.suggest_memory_format());
}

}  // namespace

void register_cells(const std::function<void(const char*, torch::CppFunction)>& offer) {
  offer("aten::_thnn_fused_lstm_cell", torch::CppFunction::makeFromUnboxedFunction(&lstm_cell));
  offer("aten::_thnn_fused_lstm_cell_backward_impl",
        torch::CppFunction::makeFromUnboxedFunction(&lstm_cell_backward));
  offer("aten::_thnn_fused_gru_cell", torch::CppFunction::makeFromUnboxedFunction(&gru_cell));
  offer("aten::_thnn_fused_gru_cell_backward",
        torch::CppFunction::makeFromUnboxedFunction(&gru_cell_backward));
  offer("aten::pixel_shuffle", torch::CppFunction::makeFromUnboxedFunction(&pixel_shuffle));
  offer("aten::pixel_unshuffle", torch::CppFunction::makeFromUnboxedFunction(&pixel_unshuffle));
  offer("aten::histc", torch::CppFunction::makeFromUnboxedFunction(&histc_any));
  offer("aten::histc.out", torch::CppFunction::makeFromUnboxedFunction(&histc_out));
}

}  // namespace shiplap::backend
