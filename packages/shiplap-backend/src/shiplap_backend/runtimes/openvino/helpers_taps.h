// Pooling, interpolation and padding as gathered and weighted elements, dim by dim. Parsed by the generator like helpers.h.
#pragma once

#include <openvino/op/gather.hpp>
#include <openvino/op/logical_or.hpp>
#include <openvino/op/not_equal.hpp>
#include <openvino/op/scatter_elements_update.hpp>

#include <helpers.h>
#include <helpers_nan.h>
#include <shiplap_backend/taps.h>

namespace shiplap::backend::helpers {

namespace detail {

static Node picked(Node value, int64_t axis, at::IntArrayRef index) { return make<ov::op::v8::Gather>(value, constant(index), constant(at::Scalar(axis), at::kLong)); }

static Node floats(const std::vector<float>& values, const std::vector<size_t>& sizes) {
  return ov::op::v0::Constant::create(ov::element::f32, ov::Shape(sizes), values)->output(0);
}

// Sums of weighted elements along `axis`. Where there are fewer, what stands in their place does not count, infinity included.
static Node weighted(Node value, int64_t axis, const Taps& taps) {
  size_t per = 1;
  for (const auto& row : taps) per = std::max(per, row.size());
  std::vector<int64_t> index;
  std::vector<float> weight, there;
  for (const auto& row : taps) {
    for (size_t k = 0; k < per; ++k) {
      there.push_back(k < row.size() ? 1.f : 0.f);
      index.push_back(k < row.size() ? row[k].first : 0);
      weight.push_back(k < row.size() ? row[k].second : 1.f);
    }
  }
  auto shape = sizes(value);
  shape[axis] = static_cast<int64_t>(taps.size());
  shape.insert(shape.begin() + axis + 1, static_cast<int64_t>(per));
  std::vector<size_t> around(shape.size(), 1);
  around[axis] = taps.size();
  around[axis + 1] = per;
  value = reshaped(picked(value, axis, index), shape);
  auto all_one = [](const std::vector<float>& v) { return std::all_of(v.begin(), v.end(), [](float f) { return f == 1; }); };
  auto type = dtype(value);
  if (!all_one(weight)) value = make<ov::op::v1::Multiply>(value, convert(floats(weight, around), type));
  if (!all_one(there)) value = make<ov::op::v1::Select>(convert(floats(there, around), at::kBool), value, constant(at::Scalar(0), type));
  shape.erase(shape.begin() + axis + 1);
  return reshaped(per == 1 ? value : sum_of(value, {axis + 1}), shape);
}

template <class Along>
static Node along_each(Node value, int64_t first, int64_t count, Along along) {
  for (int64_t d = count - 1; d >= 0; --d) value = weighted(value, first + d, along(d));
  return value;
}

// The largest of each window along the last dims and where it is, as torch looks for it: in order, the first of equals, the last NaN.
static std::vector<Node> highest(Node value, const std::vector<Taps>& taps) {
  auto rank = static_cast<int64_t>(sizes(value).size()), count = static_cast<int64_t>(taps.size());
  auto lowest = constant(at::Scalar(-std::numeric_limits<double>::infinity()), dtype(value));
  Node index;
  int64_t step = 1;
  for (int64_t d = count - 1; d >= 0; --d) {
    auto axis = rank - count + d;
    size_t per = 1;
    for (const auto& row : taps[d]) per = std::max(per, row.size());
    auto size = static_cast<int64_t>(taps[d].size()), n = sizes(value)[axis];
    std::vector<int64_t> around(rank, 1);
    around[axis] = size;
    Node best, where, from = value, inner = index;
    for (size_t k = 0; k < per; ++k) {
      std::vector<int64_t> at;  // a window that is full already looks at its last element again, which changes nothing
      std::vector<int64_t> offset;
      for (const auto& row : taps[d]) at.push_back(row[std::min(k, row.size() - 1)].first);
      for (auto i : at) offset.push_back(i * step);
      Node v = picked(from, axis, at);
      Node place = convert(reshaped(constant(offset), around), at::kInt);
      if (inner.get_node()) place = make<ov::op::v1::Add>(place, picked(inner, axis, at));
      if (k == 0) {
        // Nothing exceeds minus infinity: then it is the first place.
        best = v;
        where = inner.get_node() ? place : make<ov::op::v3::Broadcast>(place, constant(sizes(v)));
        continue;
      }
      Node higher = make<ov::op::v1::LogicalOr>(Greater(v, best), make<ov::op::v1::NotEqual>(v, v));
      best = make<ov::op::v1::Select>(higher, v, best);
      where = make<ov::op::v1::Select>(higher, place, where);
    }
    value = best;
    index = where;
    step *= n;
  }
  return {value, index};
}

}  // namespace detail

// --- interpolation: the last dims of `value`, or of a gradient, to `sizes`

inline Node interpolated(Node value, at::IntArrayRef size, std::string_view mode, bool align_corners, std::optional<double> depth, std::optional<double> height, std::optional<double> width) {
  auto count = static_cast<int64_t>(size.size());
  std::optional<double> scales[] = {depth, height, width};
  return detail::along_each(value, 2, count, [&](int64_t d) { return interpolation(mode, sizes(value)[2 + d], size[d], scales[3 - count + d], align_corners); });
}
inline Node interpolated_gradient(Node grad, at::IntArrayRef input, std::string_view mode, bool align_corners, std::optional<double> depth, std::optional<double> height, std::optional<double> width) {
  auto count = static_cast<int64_t>(input.size()) - 2;
  std::optional<double> scales[] = {depth, height, width};
  return detail::along_each(grad, 2, count, [&](int64_t d) {
    return reversed(interpolation(mode, input[2 + d], sizes(grad)[2 + d], scales[3 - count + d], align_corners), input[2 + d]);
  });
}

// --- padding: `padding` is (left, right) of the last dim first

inline Node bordered(Node value, at::IntArrayRef padding, bool reflected) {
  auto count = static_cast<int64_t>(padding.size()) / 2, first = static_cast<int64_t>(sizes(value).size()) - count;
  return detail::along_each(value, first, count, [&](int64_t d) {
    auto at = 2 * (count - 1 - d);
    return beyond(sizes(value)[first + d], padding[at], padding[at + 1], reflected);
  });
}
inline Node bordered_gradient(Node grad, at::IntArrayRef input, at::IntArrayRef padding, bool reflected) {
  auto count = static_cast<int64_t>(padding.size()) / 2, first = static_cast<int64_t>(input.size()) - count;
  return detail::along_each(grad, first, count, [&](int64_t d) {
    auto at = 2 * (count - 1 - d);
    return reversed(beyond(input[first + d], padding[at], padding[at + 1], reflected), input[first + d]);
  });
}

// --- pooling over the last dims

inline Node averaged(Node value, at::IntArrayRef out, at::IntArrayRef kernel, at::IntArrayRef stride, at::IntArrayRef padding, bool padding_counts, std::optional<int64_t> divisor) {
  auto count = static_cast<int64_t>(kernel.size()), first = static_cast<int64_t>(out.size()) - count;
  Node sum = detail::along_each(value, first, count, [&](int64_t d) {
    return averages(sizes(value)[first + d], out[first + d], kernel[d], stride[d], padding[d], padding_counts, !divisor.has_value());
  });
  return divisor ? make<ov::op::v1::Divide>(sum, constant(at::Scalar(*divisor), dtype(sum))) : sum;
}
inline Node averaged_gradient(Node grad, at::IntArrayRef input, at::IntArrayRef kernel, at::IntArrayRef stride, at::IntArrayRef padding, bool padding_counts, std::optional<int64_t> divisor) {
  auto count = static_cast<int64_t>(kernel.size()), first = static_cast<int64_t>(input.size()) - count;
  Node sum = detail::along_each(grad, first, count, [&](int64_t d) {
    auto n = input[first + d];
    return reversed(averages(n, sizes(grad)[first + d], kernel[d], stride[d], padding[d], padding_counts, !divisor.has_value()), n);
  });
  return divisor ? make<ov::op::v1::Divide>(sum, constant(at::Scalar(*divisor), dtype(sum))) : sum;
}
inline Node adaptive_average_gradient(Node grad, at::IntArrayRef input, int64_t dims) {
  auto first = static_cast<int64_t>(input.size()) - dims;
  return detail::along_each(grad, first, dims, [&](int64_t d) { return reversed(adaptive(input[first + d], sizes(grad)[first + d], true), input[first + d]); });
}
inline std::vector<Node> highest(Node value, at::IntArrayRef out, at::IntArrayRef kernel, at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation) {
  std::vector<Taps> taps;
  auto first = out.size() - kernel.size();
  for (size_t d = 0; d < kernel.size(); ++d) taps.push_back(windows(sizes(value)[first + d], out[first + d], kernel[d], stride[d], padding[d], dilation[d]));
  return detail::highest(value, taps);
}
inline std::vector<Node> adaptive_highest(Node value, at::IntArrayRef size) {
  std::vector<Taps> taps;
  auto first = sizes(value).size() - size.size();
  for (size_t d = 0; d < size.size(); ++d) taps.push_back(adaptive(sizes(value)[first + d], size[d], false));
  return detail::highest(value, taps);
}
// The gradient of what looked for the highest: `dims` dims as one, written where `index` says. Also max_unpool.
inline Node spread(Node grad, Node index, at::IntArrayRef out, int64_t dims, std::string_view reduction) {
  std::vector<int64_t> flat(out.begin(), out.end() - dims), source = flat;
  flat.push_back(1);
  for (auto n : out.slice(out.size() - dims)) flat.back() *= n;
  source.push_back(-1);
  auto zeros = full(flat, constant(at::Scalar(0), dtype(grad)));
  auto how = reduction == "sum" ? ov::op::v12::ScatterElementsUpdate::Reduction::SUM : ov::op::v12::ScatterElementsUpdate::Reduction::NONE;
  Node made = make<ov::op::v12::ScatterElementsUpdate>(zeros, reshaped(index, source), reshaped(grad, source), constant(at::Scalar(static_cast<int64_t>(source.size()) - 1), at::kLong), how);
  return reshaped(made, out);
}

// --- windows laid side by side

inline Node columns(Node value, at::IntArrayRef out, at::IntArrayRef kernel, at::IntArrayRef dilation, at::IntArrayRef padding, at::IntArrayRef stride) {
  auto s = sizes(value);
  auto first = static_cast<int64_t>(s.size()) - 2;
  value = detail::along_each(value, first, 2, [&](int64_t d) { return unfolded(s[first + d], out[d], kernel[d], stride[d], padding[d], dilation[d], false); });
  std::vector<int64_t> split(s.begin(), s.end() - 2), order(first), shape(s.begin(), s.end() - 3);
  split.insert(split.end(), {kernel[0], out[0], kernel[1], out[1]});
  std::iota(order.begin(), order.end(), 0);
  order.insert(order.end(), {first, first + 2, first + 1, first + 3});
  shape.insert(shape.end(), {s[first - 1] * kernel[0] * kernel[1], out[0] * out[1]});
  return reshaped(make<ov::op::v1::Transpose>(reshaped(value, split), constant(order)), shape);
}
inline Node from_columns(Node columns, at::IntArrayRef size, at::IntArrayRef out, at::IntArrayRef kernel, at::IntArrayRef dilation, at::IntArrayRef padding, at::IntArrayRef stride) {
  auto s = sizes(columns);
  auto first = static_cast<int64_t>(s.size()) - 1;
  std::vector<int64_t> split(s.begin(), s.end() - 2), order(first), shape = split;
  auto channels = s[first - 1] / (kernel[0] * kernel[1]);
  split.insert(split.end(), {channels, kernel[0], kernel[1], out[0], out[1]});
  std::iota(order.begin(), order.end(), 0);
  order.insert(order.end(), {first, first + 2, first + 1, first + 3});
  shape.insert(shape.end(), {channels, kernel[0] * out[0], kernel[1] * out[1]});
  auto value = reshaped(make<ov::op::v1::Transpose>(reshaped(columns, split), constant(order)), shape);
  return detail::along_each(value, first, 2, [&](int64_t d) {
    return reversed(unfolded(size[d], out[d], kernel[d], stride[d], padding[d], dilation[d], false), size[d]);
  });
}
// The gradient of Tensor.unfold: windows along `dim`, whose elements are the last dim.
inline Node from_windows(Node grad, at::IntArrayRef input, int64_t dim, int64_t size, int64_t step) {
  if (input.empty()) return sum_of(grad, {0});
  auto s = sizes(grad);
  std::vector<int64_t> order, shape(s.begin(), s.end() - 1);
  for (int64_t d = 0; d < static_cast<int64_t>(s.size()) - 1; ++d) {
    order.push_back(d);
    if (d == dim) order.push_back(static_cast<int64_t>(s.size()) - 1);
  }
  shape[dim] *= size;
  auto value = reshaped(make<ov::op::v1::Transpose>(grad, constant(order)), shape);
  return detail::weighted(value, dim, reversed(unfolded(input[dim], s[dim], size, step, 0, 1, true), input[dim]));
}

}  // namespace shiplap::backend::helpers
