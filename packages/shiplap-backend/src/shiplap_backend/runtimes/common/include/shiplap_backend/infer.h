// Output mode `infer`: the op's own Meta kernel says sizes, strides and dtype of every output. It runs on tensors without memory at each
// call, so what it says holds for these arguments; nothing is pasted into generated code.
#pragma once

#include <array>
#include <optional>
#include <tuple>
#include <type_traits>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>
#include <shiplap_backend/memory.h>

namespace shiplap::backend {

namespace detail {

inline at::Tensor on_meta(const at::Tensor& t) {
  return t.defined() ? at::empty_strided(t.sizes(), t.strides(), t.options().device(c10::kMeta)) : t;
}
inline std::optional<at::Tensor> on_meta(const std::optional<at::Tensor>& t) {
  return t.has_value() ? std::optional(on_meta(*t)) : std::nullopt;
}
// Sizes are SymInt in some schemas and plain integers in others.
struct Integers {
  at::IntArrayRef values;
  operator c10::SymIntArrayRef() const { return c10::fromIntArrayRefSlow(values); }
  operator at::IntArrayRef() const { return values; }
};
inline Integers on_meta(at::IntArrayRef values) {
  return {values};
}
template <class T>
const T& on_meta(const T& value) {
  return value;
}

inline at::Tensor on_device(const at::Tensor& meta) {
  auto device = current_device(); // generated code has set it
  return meta.defined() ? at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(device)) : meta;
}

} // namespace detail

// infer<at::_ops::hardswish>(self) -> {result}
template <class Op, class... A>
auto infer(const A&... arguments) {
  c10::DispatchKeySet meta(c10::DispatchKey::Meta);
  auto results = Op::redispatch(meta, detail::on_meta(arguments)...);
  if constexpr (std::is_same_v<decltype(results), at::Tensor>) {
    return std::array<at::Tensor, 1>{detail::on_device(results)};
  } else {
    return std::apply([](const auto&... r) { return std::array<at::Tensor, sizeof...(r)>{detail::on_device(r)...}; }, results);
  }
}

} // namespace shiplap::backend
