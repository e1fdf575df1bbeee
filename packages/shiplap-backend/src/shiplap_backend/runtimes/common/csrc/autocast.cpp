// What torch.autocast means on the device: the ops and the precisions are those that torch uses for
// its own accelerators.
#include <ATen/core/dispatch/Dispatcher.h>
#include <shiplap_backend/memory.h>
#include <torch/library.h>

#include <algorithm>
#include <string_view>

// ATen/autocast_mode.h would pull in every operator; these two are all that is used of it.
namespace at::autocast {
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
TORCH_API Tensor cached_cast(at::ScalarType to_type, const Tensor& arg, DeviceType device_type);
}  // namespace at::autocast

namespace shiplap::backend {
namespace {

using c10::IValue;
using torch::jit::Stack;

// By name, so that a torch which lacks one simply does not have it.
constexpr std::string_view kLower[] = {
    "_convolution",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_tbc",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "convolution",
    "prelu",
    "addmm",
    "addmv",
    "addr",
    "matmul",
    "einsum",
    "mm",
    "mv",
    "linalg_vecdot",
    "linear",
    "addbmm",
    "baddbmm",
    "bmm",
    "chain_matmul",
    "linalg_multi_dot",
    "lstm_cell",
    "gru_cell",
    "rnn_tanh_cell",
    "rnn_relu_cell",
    "scaled_dot_product_attention",
};
constexpr std::string_view kFloat32[] = {
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow",
    "softplus",
    "layer_norm",
    "native_layer_norm",
    "group_norm",
    "frobenius_norm",
    "nuclear_norm",
    "cosine_similarity",
    "poisson_nll_loss",
    "cosine_embedding_loss",
    "nll_loss",
    "nll_loss2d",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "mse_loss",
    "margin_ranking_loss",
    "multilabel_margin_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "multi_margin_loss",
    "binary_cross_entropy_with_logits",
    "dist",
    "pdist",
    "cdist",
    "renorm",
    "logsumexp",
    "softmax",
    "log_softmax",
    "cumprod",
    "cumsum",
    "prod",
    "sum",
    "norm",
};
constexpr std::string_view kPromote[] = {
    "addcdiv",      "addcmul",   "atan2",     "bilinear",    "cross", "dot",   "vdot",
    "grid_sampler", "index_put", "tensordot", "scatter_add", "cat",   "stack",
};

enum class Precision { lower, float32, widest };

at::ScalarType widest(Stack& stack, size_t first) {
  auto wide = at::autocast::get_autocast_dtype(kDeviceType);
  auto look = [&](const at::Tensor& t) {
    wide = on_device(t) && t.scalar_type() == at::kFloat ? at::kFloat : wide;
  };
  for (auto i = first; i < stack.size(); ++i) {
    if (stack[i].isTensor()) {
      look(stack[i].toTensor());
    } else if (stack[i].isTensorList()) {
      auto list = stack[i].toTensorVector();
      std::for_each(list.begin(), list.end(), look);
    }
  }
  return wide;
}

template <Precision precision>
void cast_and_call(const c10::OperatorHandle& op, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  const auto first = stack->size() - op.schema().arguments().size();
  auto to = precision == Precision::float32 ? at::kFloat
            : precision == Precision::lower ? at::autocast::get_autocast_dtype(kDeviceType)
                                            : widest(*stack, first);
  auto cast = [to](const at::Tensor& t) {
    return t.defined() ? at::autocast::cached_cast(to, t, kDeviceType) : t;
  };
  for (auto i = first; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = cast(value.toTensor());
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      std::transform(list.begin(), list.end(), list.begin(), cast);
      value = IValue(list);
    }
  }
  op.callBoxed(stack);
}

// Functional overloads only: what writes to a tensor keeps that tensor's dtype.
bool functional(const c10::FunctionSchema& schema) {
  const auto& a = schema.arguments();
  return std::none_of(a.begin(), a.end(), [](const auto& x) { return x.alias_info() != nullptr; });
}

template <Precision precision, size_t n>
void register_all(torch::Library& m, const std::string_view (&names)[n]) {
  for (const auto& op : c10::Dispatcher::singleton().getAllOpNames()) {
    std::string_view name = op.name;
    if (!name.starts_with("aten::") || std::find(names, names + n, name.substr(6)) == names + n) {
      continue;
    }
    auto handle = c10::Dispatcher::singleton().findSchema(op);
    if (handle && functional(handle->schema())) {
      m.impl(c10::toString(op).c_str(),
             torch::CppFunction::makeFromBoxedFunction<&cast_and_call<precision>>());
    }
  }
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());  // all other ops take what they are given
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  register_all<Precision::lower>(m, kLower);
  register_all<Precision::float32>(m, kFloat32);
  register_all<Precision::widest>(m, kPromote);
}

}  // namespace
}  // namespace shiplap::backend
