// Which attention scaled_dot_product_attention takes on the device: the target's graph where it has
// one that takes the call, otherwise products and a softmax.
#include <ATen/Context.h>
#include <ATen/SDPBackend.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/transformers/attention.h>
#include <shiplap_backend/memory.h>

namespace shiplap::backend {
namespace {

bool has_own() {
  static const bool own = [] {
    auto op = c10::Dispatcher::singleton().findSchema(
        {"aten::_scaled_dot_product_flash_attention_for_cpu", ""});
    return op.has_value() && op->hasKernelForDispatchKey(kKey);
  }();
  return own;
}

bool alike(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  auto sizes = q.dim() == 4 && k.dim() == 4 && v.dim() == 4 && q.size(0) == k.size(0) &&
               q.size(1) == k.size(1) && q.size(3) == k.size(3) &&
               k.sizes() == v.sizes();
  auto type = q.scalar_type();
  return sizes && type == k.scalar_type() && type == v.scalar_type() &&
         (type == at::kFloat || type == at::kHalf || type == at::kBFloat16);
}

int64_t choice(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
               const std::optional<at::Tensor>& mask, double dropout, bool causal,
               std::optional<double> /*scale*/, bool /*enable_gqa: heads are compared*/) {
  auto masked = mask.has_value() && mask->defined();
  auto own = has_own() && at::globalContext().userEnabledFlashSDP() && dropout == 0 && alike(q, k, v) && q.numel() > 0 && k.numel() > 0 &&
             !(masked && (causal || mask->requires_grad()));
  return static_cast<int64_t>(own ? at::SDPBackend::flash_attention : at::SDPBackend::math);
}

}  // namespace
}  // namespace shiplap::backend

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &shiplap::backend::choice)
}  // namespace at::native
