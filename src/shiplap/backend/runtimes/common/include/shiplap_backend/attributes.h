// Values that vendor expressions compute from sizes and attributes. Parsed by the generator: one declaration a function, `inline` first.
#pragma once

#include <vector>

#include <ATen/WrapDimUtils.h>
#include <ATen/core/Tensor.h>

namespace shiplap::backend::attributes {

inline int64_t rank(const at::Tensor& t) { return t.dim(); }
inline int64_t numel(const at::Tensor& t) { return t.numel(); }
inline int64_t size(const at::Tensor& t, int64_t dim) { return t.size(dim); }
inline std::vector<int64_t> sizes(const at::Tensor& t) { return t.sizes().vec(); }
inline at::ScalarType dtype_of(const at::Tensor& t) { return t.scalar_type(); }
inline bool is_float(const at::Tensor& t) { return t.is_floating_point(); }
inline bool is_bool(const at::Tensor& t) { return t.scalar_type() == at::kBool; }

// A dim counted from the front; 0-dim tensors have one.
inline int64_t wrap(int64_t dim, const at::Tensor& t) { return at::maybe_wrap_dim(dim, t.dim()); }

// The dims of a reduction, from the front; none given means all.
inline std::vector<int64_t> axes(at::OptionalIntArrayRef dims, const at::Tensor& t) {
  std::vector<int64_t> out;
  if (dims.has_value() && !dims->empty()) {
    for (auto d : *dims) if (t.dim() > 0) out.push_back(at::maybe_wrap_dim(d, t.dim()));
  } else {
    for (int64_t d = 0; d < t.dim(); ++d) out.push_back(d);
  }
  return out;
}

// The same for one optional dim.
inline std::vector<int64_t> axis(std::optional<int64_t> dim, const at::Tensor& t) {
  if (!dim.has_value()) return axes(std::nullopt, t);
  return t.dim() ? std::vector<int64_t>{at::maybe_wrap_dim(*dim, t.dim())} : std::vector<int64_t>{};
}

} // namespace shiplap::backend::attributes
