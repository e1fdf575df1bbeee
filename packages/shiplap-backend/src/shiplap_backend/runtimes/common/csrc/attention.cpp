// scaled_dot_product_attention takes the way that it takes on the CPU, so that results and gradients
// have the strides of the CPU's. The fused operator is made of products here, unless the target
// registers a kernel of its own (register_stand_ins).
#include <ATen/OpMathType.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_ops.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <shiplap_backend/cells.h>
#include <shiplap_backend/memory.h>

#include <cmath>
#include <limits>

namespace shiplap::backend {
namespace {

using Mask = std::optional<at::Tensor>;

constexpr double kHidden = -std::numeric_limits<double>::infinity();

// The CPU's kernel asks for sizes, strides and dtypes only, so it may be asked about tensors of a device.
int64_t choice(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Mask& mask,
               double dropout, bool causal, std::optional<double> scale, bool grouped) {
  return at::_ops::_fused_sdp_choice::redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU), q, k, v,
                                                 mask, dropout, causal, scale, grouped);
}

double factor(const at::Tensor& q, std::optional<double> scale) {
  return scale.value_or(1 / std::sqrt(static_cast<double>(q.size(-1))));
}

at::Tensor scores(const at::Tensor& q, const at::Tensor& k, const Mask& mask, bool causal,
                  std::optional<double> scale) {
  auto s = q.matmul(k.transpose(-2, -1)).mul(factor(q, scale));
  if (causal) {
    auto later = s.new_ones({s.size(-2), s.size(-1)}, s.options().dtype(at::kBool)).triu(1);
    s = s.masked_fill(later, kHidden);
  }
  if (!mask || !mask->defined()) return s;
  return mask->scalar_type() == at::kBool ? s.masked_fill(mask->logical_not(), kHidden) : s.add(*mask);
}

// exp(scores - sums), and 0 in a row that sees nothing, whose sum is -inf.
at::Tensor weights(const at::Tensor& scores, const at::Tensor& sums) {
  return scores.sub(sums.masked_fill(sums.eq(kHidden), 0).unsqueeze(-1)).exp();
}

at::Tensor into(const at::Tensor& made, const at::Tensor& values) {
  if (made.strides() == values.strides() && made.scalar_type() == values.scalar_type()) return values;
  return made.copy_(values);
}

// Keys or values of fewer heads, as the queries have them: each stands for as many heads in a row.
at::Tensor repeated(const at::Tensor& kv, const at::Tensor& q) {
  auto heads = kv.size(1), each = heads ? q.size(1) / heads : 1;
  if (each == 1) return kv;
  auto all = kv.unsqueeze(2).expand({-1, -1, each, -1, -1});
  return all.reshape({kv.size(0), q.size(1), kv.size(2), kv.size(3)});
}

// The gradient of `repeated`.
at::Tensor summed(const at::Tensor& grad, const at::Tensor& kv) {
  if (grad.size(1) == kv.size(1)) return grad;
  return grad.reshape({kv.size(0), kv.size(1), grad.size(1) / kv.size(1), kv.size(2), kv.size(3)}).sum({2});
}

// [batch, heads, length, ...] in memory of [batch, length, heads, ...], as the CPU's kernels store it.
at::Tensor by_length(const at::Tensor& values, at::ScalarType dtype) {
  auto sizes = values.sizes().vec();
  std::swap(sizes[1], sizes[2]);
  return into(at::empty(sizes, values.options().dtype(dtype)).transpose(1, 2), values);
}

std::tuple<at::Tensor, at::Tensor> attention(const at::Tensor& q, const at::Tensor& k,
                                             const at::Tensor& v, double dropout, bool causal,
                                             const Mask& mask, std::optional<double> scale) {
  TORCH_CHECK(dropout == 0, "_scaled_dot_product_flash_attention_for_cpu: no dropout, got ", dropout);
  auto wide = at::toOpMathType(q.scalar_type());
  auto s = scores(q.to(wide), repeated(k.to(wide), q), mask, causal, scale);
  auto sums = s.logsumexp(-1);
  return {into(at::empty_like(q), weights(s, sums).matmul(repeated(v.to(wide), q))), by_length(sums, wide)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_backward(
    const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& out, const at::Tensor& sums, double /*dropout: none*/, bool causal,
    const Mask& mask, std::optional<double> scale) {
  auto dtype = q.scalar_type(), wide = at::toOpMathType(dtype);
  auto wq = q.to(wide), wk = repeated(k.to(wide), q), g = grad.to(wide);
  auto p = weights(scores(wq, wk, mask, causal, scale), sums);
  auto rows = g.mul(out.to(wide)).sum({-1}, true);
  auto ds = g.matmul(repeated(v.to(wide), q).transpose(-2, -1)).sub(rows).mul(p).mul(factor(q, scale));
  return {by_length(ds.matmul(wk), dtype), by_length(summed(ds.transpose(-2, -1).matmul(wq), k), dtype),
          by_length(summed(p.transpose(-2, -1).matmul(g), v), dtype)};
}

}  // namespace

void register_attention(const std::function<void(const char*, torch::CppFunction)>& offer) {
  offer("aten::_scaled_dot_product_flash_attention_for_cpu",
        torch::CppFunction::makeFromUnboxedFunction(&attention));
  offer("aten::_scaled_dot_product_flash_attention_for_cpu_backward",
        torch::CppFunction::makeFromUnboxedFunction(&attention_backward));
}

}  // namespace shiplap::backend

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &shiplap::backend::choice)
}  // namespace at::native
