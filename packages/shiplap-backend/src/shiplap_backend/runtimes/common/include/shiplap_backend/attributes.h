// Values that vendor expressions compute from sizes and attributes. Parsed by the generator: one declaration a function, `inline` first.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cmath>
#include <vector>

#include <ATen/WrapDimUtils.h>
#include <ATen/core/IListRef.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/Pool.h>
#include <ATen/ops/result_type.h>
#include <shiplap_backend/memory.h>

namespace shiplap::backend::attributes {

// How many dims there are.
inline int64_t rank(const at::Tensor& t) { return t.dim(); }
// How many elements there are.
inline int64_t numel(const at::Tensor& t) { return t.numel(); }
// The size of one dim.
inline int64_t size(const at::Tensor& t, int64_t dim) { return t.size(dim); }
// The sizes of all dims.
inline std::vector<int64_t> sizes(const at::Tensor& t) { return t.sizes().vec(); }
// The dtype of a tensor.
inline at::ScalarType dtype_of(const at::Tensor& t) { return t.scalar_type(); }
// Whether the dtype is a floating-point one.
inline bool is_float(const at::Tensor& t) { return t.is_floating_point(); }
// Whether the dtype is bool.
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

// Sizes of a reduction's result.
inline std::vector<int64_t> reduced(const at::Tensor& t, at::OptionalIntArrayRef dims, bool keepdim) {
  auto gone = axes(dims, t);
  std::vector<int64_t> out;
  for (int64_t d = 0; d < t.dim(); ++d) {
    if (std::find(gone.begin(), gone.end(), d) == gone.end()) out.push_back(t.size(d));
    else if (keepdim) out.push_back(1);
  }
  return out;
}
// How many elements each result of a reduction is made of.
inline int64_t reduced_count(const at::Tensor& t, at::OptionalIntArrayRef dims) {
  int64_t n = 1;
  for (auto d : axes(dims, t)) n *= t.size(d);
  return n;
}

// The dims that a norm is taken over: the last ones.
inline std::vector<int64_t> last_axes(const at::Tensor& t, at::IntArrayRef normalized) {
  std::vector<int64_t> out;
  for (int64_t d = t.dim() - static_cast<int64_t>(normalized.size()); d < t.dim(); ++d) out.push_back(d);
  return out;
}
// The dims that a norm is not taken over.
inline std::vector<int64_t> first_axes(const at::Tensor& t, at::IntArrayRef normalized) {
  std::vector<int64_t> out;
  for (int64_t d = 0; d < t.dim() - static_cast<int64_t>(normalized.size()); ++d) out.push_back(d);
  return out;
}
// The sizes of a norm's statistics.
inline std::vector<int64_t> statistics(const at::Tensor& t, at::IntArrayRef normalized) {
  auto out = t.sizes().vec();
  for (auto d : last_axes(t, normalized)) out[d] = 1;
  return out;
}
// The product of all values.
inline int64_t product(at::IntArrayRef sizes) {
  int64_t n = 1;
  for (auto s : sizes) n *= s;
  return n;
}

// [n] or [] where n dims are meant.
inline std::vector<int64_t> expanded(at::IntArrayRef values, int64_t n) {
  return values.size() == 1 ? std::vector<int64_t>(n, values[0]) : values.vec();
}
// The strides of a pooling, which are the kernel's sizes if none are given.
inline std::vector<int64_t> stride_or(at::IntArrayRef stride, at::IntArrayRef kernel, int64_t n) {
  return expanded(stride.empty() ? kernel : stride, n);
}
// How many values there are.
inline int64_t length(at::IntArrayRef values) { return static_cast<int64_t>(values.size()); }
// Whether each value is `what`.
inline bool all_are(at::IntArrayRef values, int64_t what) {
  return std::all_of(values.begin(), values.end(), [&](int64_t v) { return v == what; });
}
// Whether no value is below `what`.
inline bool all_at_least(at::IntArrayRef values, int64_t what) {
  return std::all_of(values.begin(), values.end(), [&](int64_t v) { return v >= what; });
}

// The vendor reads an index outside its range without a word; the CPU raises.
inline bool indices_fit(const at::Tensor& index, int64_t n) {
  if (index.numel() == 0) return true;
  auto contiguous = host_view(index).contiguous();
  auto inside = [&](auto* p) { return std::all_of(p, p + contiguous.numel(), [&](auto i) { return i >= 0 && i < n; }); };
  return index.scalar_type() == at::kLong ? inside(static_cast<const int64_t*>(contiguous.const_data_ptr()))
      : index.scalar_type() == at::kInt && inside(static_cast<const int32_t*>(contiguous.const_data_ptr()));
}
inline bool targets_fit(const at::Tensor& target, int64_t n, int64_t ignored) {
  if (target.scalar_type() != at::kLong) return false;
  auto contiguous = host_view(target).contiguous();
  auto* p = static_cast<const int64_t*>(contiguous.const_data_ptr());
  return std::all_of(p, p + contiguous.numel(), [&](int64_t i) { return i == ignored || (i >= 0 && i < n); });
}
// Whether each dim of `small` other than `dim` is that of `large`.
inline bool same_but(const at::Tensor& small, const at::Tensor& large, int64_t dim) {
  if (small.dim() != large.dim() || small.dim() == 0) return false;
  dim = at::maybe_wrap_dim(dim, small.dim());
  for (int64_t d = 0; d < small.dim(); ++d) if (d != dim && small.size(d) != large.size(d)) return false;
  return true;
}
// Whether the sizes are the same.
inline bool same_sizes(const at::Tensor& a, const at::Tensor& b) { return a.sizes() == b.sizes(); }
// Whether the dtypes are the same.
inline bool same_dtype(const at::Tensor& a, const at::Tensor& b) { return a.scalar_type() == b.scalar_type(); }
// Sizes with one dim replaced.
inline std::vector<int64_t> resized(const at::Tensor& t, int64_t dim, int64_t n) {
  auto out = t.sizes().vec();
  if (!out.empty()) out[at::maybe_wrap_dim(dim, t.dim())] = n;
  return out;
}
// The dtype that two tensors are promoted to.
inline at::ScalarType promoted(const at::Tensor& a, const at::Tensor& b) { return at::result_type(a, b); }
// A dtype that the vendor reads without loss.
inline bool is_real(const at::Tensor& t) {
  return t.scalar_type() != at::kLong && t.scalar_type() != at::kDouble && !t.is_complex() || t.unsafeGetTensorImpl()->is_wrapped_number();
}
// Whether the magnitude is below 2^23.
inline bool is_small(const at::Scalar& s) { return std::abs(s.toDouble()) < 8388608; }
// A whole number that int32 holds.
inline bool is_int32(const at::Scalar& s) {
  auto v = s.toDouble();
  return v == std::trunc(v) && std::abs(v) <= INT32_MAX;
}
// Probabilities; the CPU raises for others.
inline bool inside_unit(const at::Tensor& t) {
  if (t.scalar_type() != at::kFloat) return false;
  auto contiguous = host_view(t).contiguous();
  auto* p = static_cast<const float*>(contiguous.const_data_ptr());
  return std::all_of(p, p + contiguous.numel(), [](float v) { return v >= 0 && v <= 1; });
}
// The vendor passes over NaN where torch hands it on.
inline bool no_nan(const at::Tensor& t) {
  auto dense = host_view(t.is_non_overlapping_and_dense() ? t : t.contiguous());
  auto count = [&](auto* p) {
    int64_t found = 0;
    for (int64_t i = 0; i < dense.numel(); ++i) found += static_cast<float>(p[i]) != static_cast<float>(p[i]);
    return found;
  };
  switch (t.scalar_type()) {
    case at::kFloat: return count(static_cast<const float*>(dense.const_data_ptr())) == 0;
    case at::kHalf: return count(static_cast<const at::Half*>(dense.const_data_ptr())) == 0;
    case at::kBFloat16: return count(static_cast<const at::BFloat16*>(dense.const_data_ptr())) == 0;
    default: return true;
  }
}
// Every dim but one.
inline std::vector<int64_t> all_but(const at::Tensor& t, int64_t dim) {
  std::vector<int64_t> out;
  for (int64_t d = 0; d < t.dim(); ++d) if (d != dim) out.push_back(d);
  return out;
}

// Sizes of a convolution's result.
inline std::vector<int64_t> convolved(
    const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
    bool transposed, at::IntArrayRef output_padding, int64_t groups) {
  std::vector<int64_t> out{input.size(0), transposed ? weight.size(1) * groups : weight.size(0)};
  for (int64_t d = 0; d < input.dim() - 2; ++d) {
    auto reach = dilation[d] * (weight.size(d + 2) - 1);
    out.push_back(
        transposed ? (input.size(d + 2) - 1) * stride[d] - 2 * padding[d] + reach + output_padding[d] + 1
                   : (input.size(d + 2) + 2 * padding[d] - reach - 1) / stride[d] + 1);
  }
  return out;
}
// The seed's modes of shape: products, concatenations, swapped dims.
inline std::vector<int64_t> multiplied(const at::Tensor& a, const at::Tensor& b) {
  TORCH_CHECK(a.dim() >= 2 && a.dim() == b.dim() && a.size(-1) == b.size(-2), "cannot multiply ", a.sizes(), " by ", b.sizes());
  auto out = a.sizes().vec();
  out.back() = b.size(-1);
  return out;
}
inline std::vector<int64_t> concatenated(at::ITensorListRef tensors, int64_t dim) {
  auto out = tensors.front().sizes().vec();
  dim = at::maybe_wrap_dim(dim, static_cast<int64_t>(out.size()));
  out[dim] = 0;
  for (const at::Tensor& t : tensors) out[dim] += t.size(dim);
  return out;
}
inline std::vector<int64_t> swapped(const at::Tensor& t, int64_t dim0, int64_t dim1) {
  auto out = t.sizes().vec();
  std::swap(out[at::maybe_wrap_dim(dim0, t.dim())], out[at::maybe_wrap_dim(dim1, t.dim())]);
  return out;
}

inline std::vector<int64_t> pooled(
    const at::Tensor& t, at::IntArrayRef kernel, at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool ceil_mode) {
  auto out = t.sizes().vec();
  auto n = static_cast<int64_t>(kernel.size() == 1 ? 3 : kernel.size()), first = t.dim() - n;
  auto k = expanded(kernel, n), s = stride_or(stride, kernel, n), p = expanded(padding, n), d = expanded(dilation, n);
  for (int64_t i = 0; i < n; ++i) {
    out[first + i] = at::native::pooling_output_shape<int64_t>(t.size(first + i), k[i], p[i], s[i], d[i], ceil_mode);
  }
  return out;
}
// How many windows fit into two last dims.
inline std::vector<int64_t> blocks_of(at::IntArrayRef size, at::IntArrayRef kernel, at::IntArrayRef dilation, at::IntArrayRef padding, at::IntArrayRef stride) {
  std::vector<int64_t> out;
  for (size_t d = 0; d < 2; ++d) out.push_back((size[d] + 2 * padding[d] - dilation[d] * (kernel[d] - 1) - 1) / stride[d] + 1);
  return out;
}
inline std::vector<int64_t> blocks(const at::Tensor& t, at::IntArrayRef kernel, at::IntArrayRef dilation, at::IntArrayRef padding, at::IntArrayRef stride) {
  return blocks_of(t.sizes().slice(t.dim() - 2), kernel, dilation, padding, stride);
}
// Sizes with a border around the last dims, of which `padding` names the last first.
inline std::vector<int64_t> bordered_sizes(const at::Tensor& t, at::IntArrayRef padding) {
  auto out = t.sizes().vec();
  for (size_t d = 0; d < padding.size() / 2; ++d) out[out.size() - 1 - d] += padding[2 * d] + padding[2 * d + 1];
  return out;
}
inline bool can_reflect(const at::Tensor& t, at::IntArrayRef padding) {
  auto dims = static_cast<int64_t>(padding.size() / 2);
  if (t.dim() <= dims || t.dim() > dims + 2 || t.numel() == 0) return false;
  for (size_t i = 0; i < padding.size(); ++i) {
    if (padding[i] < 0 || padding[i] >= t.size(t.dim() - 1 - static_cast<int64_t>(i / 2))) return false;
  }
  return true;
}
inline bool is_bordered(const at::Tensor& bordered, const at::Tensor& t, at::IntArrayRef padding) {
  return t.numel() > 0 && t.dim() > static_cast<int64_t>(padding.size() / 2) && all_at_least(padding, 0) && bordered.sizes() == bordered_sizes(t, padding);
}

// Which dims of a tensor are indexed: 1 where an index is given.
inline std::vector<int64_t> places(const c10::List<std::optional<at::Tensor>>& indices) {
  std::vector<int64_t> out;
  for (size_t i = 0; i < indices.size(); ++i) out.push_back(indices.get(i).has_value() && indices.get(i)->defined());
  return out;
}
// Whether each index is of whole numbers inside its dim, from either end.
inline bool indices_address(const c10::List<std::optional<at::Tensor>>& indices, const at::Tensor& t) {
  bool any = false;
  for (size_t i = 0; i < indices.size(); ++i) {
    auto index = indices.get(i);
    if (!index.has_value() || !index->defined()) continue;
    any = true;
    if (static_cast<int64_t>(i) >= t.dim() || index->numel() == 0) return false;
    auto contiguous = host_view(*index).contiguous();
    auto n = t.size(static_cast<int64_t>(i));
    auto inside = [&](auto* p) { return std::all_of(p, p + contiguous.numel(), [&](auto v) { return v >= -n && v < n; }); };
    if (index->scalar_type() == at::kLong ? !inside(static_cast<const int64_t*>(contiguous.const_data_ptr()))
                                          : index->scalar_type() != at::kInt || !inside(static_cast<const int32_t*>(contiguous.const_data_ptr()))) return false;
  }
  return any && static_cast<int64_t>(indices.size()) <= t.dim() && t.numel() > 0;
}

// The number, or `otherwise` if there is none.
inline double number_or(std::optional<double> value, double otherwise) { return value.value_or(otherwise); }
inline double largest(const at::Tensor& t) {
  return t.scalar_type() == at::kHalf ? 65504.0 : t.scalar_type() == at::kBFloat16 ? 3.3895313892515355e38 : 3.4028234663852886e38;
}
inline double power_of_ten(int64_t n) { return std::pow(10.0, static_cast<double>(n)); }
// The order of a norm; 2 if none is given.
inline double order(const std::optional<at::Scalar>& p) { return p.has_value() ? p->toDouble() : 2.0; }
// From the variance of all that is there to that of what it is a sample of.
inline double unbiased(const at::Tensor& t) {
  auto n = static_cast<double>(t.numel() / t.size(1));
  return n / (n - 1);
}

// How many values arange and range make.
inline int64_t range_count(const at::Scalar& start, const at::Scalar& end, const at::Scalar& step) {
  return static_cast<int64_t>(std::ceil((end.toDouble() - start.toDouble()) / step.toDouble()));
}

} // namespace shiplap::backend::attributes
