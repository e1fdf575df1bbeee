// What generated wrappers say besides the vendor's expression: presence, dtypes, gates, results of unstructured ops.
#pragma once

#include <initializer_list>
#include <optional>
#include <vector>

#include <ATen/TensorIterator.h>
#include <ATen/core/IListRef.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/result_type.h>
#include <c10/core/DeviceGuard.h>
#include <shiplap_backend/memory.h>

namespace shiplap::backend {

template <class T>
bool has(const T&) { return true; }
template <class T>
bool has(const std::optional<T>& v) { return v.has_value(); }
inline bool has(const std::optional<at::Tensor>& t) { return t.has_value() && t->defined(); }
inline bool has(const at::Tensor& t) { return t.defined(); }
inline bool has(const at::OptionalIntArrayRef& v) { return v.has_value(); }

inline const at::Tensor& value(const std::optional<at::Tensor>& t) {
  static const at::Tensor undefined;
  return t.has_value() ? *t : undefined;
}

inline std::vector<at::Tensor> list_of(at::TensorList list) { return list.vec(); }
inline std::vector<at::Tensor> list_of(const at::ITensorListRef& list) { return {list.begin(), list.end()}; }

using Indices = c10::List<std::optional<at::Tensor>>;
inline std::vector<at::Tensor> list_of(const Indices& list) {
  std::vector<at::Tensor> given;
  for (size_t i = 0; i < list.size(); ++i) if (has(list.get(i))) given.push_back(*list.get(i));
  return given;
}

using DtypeMask = uint64_t;

constexpr DtypeMask dtypes(std::initializer_list<at::ScalarType> types) {
  DtypeMask mask = 0;
  for (auto t : types) mask |= DtypeMask{1} << static_cast<int>(t);
  return mask;
}
constexpr bool in(DtypeMask mask, at::ScalarType t) { return (mask >> static_cast<int>(t)) & 1; }

// A Python number is whatever the other operands make of it.
inline bool passes(DtypeMask mask, const at::Tensor& t) {
  return !t.defined() || in(mask, t.scalar_type()) || t.unsafeGetTensorImpl()->is_wrapped_number();
}
inline std::optional<at::ScalarType> outside(DtypeMask mask, const at::Tensor& t) {
  return passes(mask, t) ? std::nullopt : std::optional(t.scalar_type());
}
inline std::optional<at::ScalarType> outside(DtypeMask mask, const std::optional<at::Tensor>& t) { return outside(mask, value(t)); }
template <class List>
std::optional<at::ScalarType> outside_list(DtypeMask mask, const List& list) {
  for (const at::Tensor& t : list) if (auto bad = outside(mask, t)) return bad;
  return std::nullopt;
}
inline std::optional<at::ScalarType> outside(DtypeMask mask, at::TensorList list) { return outside_list(mask, list); }
inline std::optional<at::ScalarType> outside(DtypeMask mask, const at::ITensorListRef& list) { return outside_list(mask, list); }
template <class T, class... More>
std::optional<at::ScalarType> outside(DtypeMask mask, const T& first, const More&... more) {
  auto bad = outside(mask, first);
  if constexpr (sizeof...(More) > 0) return bad ? bad : outside(mask, more...);
  return bad;
}

inline bool is_empty(const at::Tensor& t) { return t.defined() && t.numel() == 0; }
inline bool is_empty(const std::optional<at::Tensor>& t) { return is_empty(value(t)); }
inline bool is_empty(at::TensorList list) { return std::any_of(list.begin(), list.end(), [](const at::Tensor& t) { return is_empty(t); }); }
inline bool is_empty(const at::ITensorListRef& list) { return is_empty(at::TensorList(list_of(list))); }

inline bool is_empty(const Indices& list) { return is_empty(at::TensorList(list_of(list))); }

inline bool nothing_in(const at::Tensor& result) { return !result.defined() || result.numel() == 0; }

// Sums and products of narrow types are formed in wide ones, as torch forms them; bool counts.
constexpr at::ScalarType opmath(at::ScalarType t) {
  switch (t) {
    case at::kHalf: case at::kBFloat16: return at::kFloat;
    case at::kBool: case at::kByte: case at::kChar: case at::kShort: return at::kInt;
    default: return t;
  }
}

// The same on a target that may lack the wide dtype.
constexpr at::ScalarType opmath(at::ScalarType t, DtypeMask there) { return in(there, opmath(t)) ? opmath(t) : t; }

inline at::ScalarType dtype_of(const at::Tensor& t) { return t.scalar_type(); }
inline at::ScalarType dtype_of(at::TensorList list) { return list.front().scalar_type(); }
inline at::ScalarType dtype_of(const at::ITensorListRef& list) { return list.front().scalar_type(); }

// Sizes and dtype of a tensor whose values the graph does not read.
inline std::vector<int64_t> geometry(const at::Tensor& t) {
  if (!t.defined()) return {-1};
  auto key = t.sizes().vec();
  key.push_back(static_cast<int64_t>(t.scalar_type()));
  return key;
}

// torch's rule for CUDA: all tensors on one device. Where torch `compares` no devices before it calls a kernel, a number of the CPU may
// be among them, and indices.
inline void same_device(const char* op, const char* name, bool compares, const at::Tensor& t, bool indices = false) {
  if (!t.defined() || t.device().type() == c10::DeviceType::PrivateUse1) return;
  if (compares || !t.is_cpu() || (t.dim() > 0 && !indices)) devices_differ(op, name, current_device(), t.device());
}
inline void same_device(const char* op, const char* name, bool compares, const std::optional<at::Tensor>& t) {
  same_device(op, name, compares, value(t));
}
template <class List>
void same_devices(const char* op, const char* name, bool compares, const List& list, bool indices = false) {
  for (const at::Tensor& t : list_of(list)) same_device(op, name, compares, t, indices);
}
inline void same_device(const char* op, const char* name, bool compares, at::TensorList list) { same_devices(op, name, compares, list); }
inline void same_device(const char* op, const char* name, bool compares, const at::ITensorListRef& list) { same_devices(op, name, compares, list); }
inline void same_device(const char* op, const char* name, bool compares, const Indices& list) { same_devices(op, name, compares, list, true); }

inline at::Tensor like(const at::Tensor& t, at::ScalarType dtype) { return at::empty_like(t, t.options().dtype(dtype)); }
// Channels last if one of `formats` is.
template <class... Formats>
at::MemoryFormat format_of(const Formats&... formats) {
  auto format = at::MemoryFormat::Contiguous;
  for (auto f : std::initializer_list<at::MemoryFormat>{formats.suggest_memory_format()...}) {
    if (f != at::MemoryFormat::Contiguous) format = f;
  }
  return format;
}
template <class... Formats>
at::Tensor make_result(at::IntArrayRef sizes, const at::Tensor& of, at::ScalarType dtype, const Formats&... formats) {
  return at::empty(sizes, of.options().dtype(dtype), format_of(formats...));
}
// Row-major in this order of its dims: dim 0 of the memory is dim order[0] of the result.
inline at::Tensor ordered(at::IntArrayRef sizes, const at::Tensor& of, at::ScalarType dtype, at::IntArrayRef order) {
  TORCH_CHECK(sizes.size() == order.size(), "an order of ", order.size(), " dims for sizes ", sizes);
  std::vector<int64_t> stored(sizes.size()), back(sizes.size());
  for (size_t i = 0; i < order.size(); ++i) {
    stored[i] = sizes[order[i]];
    back[order[i]] = static_cast<int64_t>(i);
  }
  return at::empty(stored, of.options().dtype(dtype)).permute(back);
}
// What CPU kernels do that call resize_(sizes, format) on an output of the structured meta.
template <class... Formats>
void restride(const at::Tensor& out, const Formats&... formats) {
  out.unsafeGetTensorImpl()->empty_tensor_restride(format_of(formats...));
}


// The result of an elementwise op whose operands differ in dtype: sizes and strides by TensorIterator.
inline void broadcast(const at::Tensor& out, at::ScalarType dtype, std::initializer_list<at::Tensor> operands) {
  at::TensorIteratorConfig config;
  config.check_all_same_dtype(false).check_all_same_device(false).set_check_mem_overlap(true);
  if (out.defined()) config.add_output(out); else config.declare_static_dtype_and_device(dtype, current_device()).add_owned_output(at::Tensor());
  for (const auto& t : operands) config.add_owned_const_input(t);
  auto iterator = config.build();
  const_cast<at::Tensor&>(out) = iterator.output();
}

// An out= of an op without a structured meta.
inline void fit(const at::Tensor& out, at::IntArrayRef sizes, at::ScalarType dtype) {
  TORCH_CHECK(c10::canCast(dtype, out.scalar_type()), "result type ", dtype, " can't be cast to the desired output type ", out.scalar_type());
  at::native::resize_output(out, sizes);
}

// The out= or in-place overload of an op of which the functional one is native.
inline at::Tensor& assign(at::Tensor& out, const at::Tensor& result) {
  at::native::resize_output(out, result.sizes());
  at::_ops::copy_::call(out, result, false);
  return out;
}
inline const at::Tensor& assign(const at::Tensor& out, const at::Tensor& result) { return assign(const_cast<at::Tensor&>(out), result); }

} // namespace shiplap::backend
