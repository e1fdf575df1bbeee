// Vendor functions that take more than one operation. Parsed by the generator: one declaration a function, `inline` first.
#pragma once

#include <functional>
#include <limits>
#include <numeric>
#include <string>

#include <openvino/op/add.hpp>
#include <openvino/op/broadcast.hpp>
#include <openvino/op/convolution.hpp>
#include <openvino/op/greater_eq.hpp>
#include <openvino/op/matmul.hpp>
#include <openvino/op/group_conv.hpp>
#include <openvino/op/multiply.hpp>
#include <openvino/op/equal.hpp>
#include <openvino/op/is_nan.hpp>
#include <openvino/op/reduce_logical_or.hpp>
#include <openvino/op/reduce_max.hpp>
#include <openvino/op/reduce_mean.hpp>
#include <openvino/op/reduce_min.hpp>
#include <openvino/op/reduce_sum.hpp>
#include <openvino/op/subtract.hpp>
#include <openvino/op/divide.hpp>
#include <openvino/op/pad.hpp>
#include <openvino/op/range.hpp>
#include <openvino/op/reshape.hpp>
#include <openvino/op/select.hpp>
#include <openvino/op/slice.hpp>
#include <openvino/op/transpose.hpp>
#include <openvino/op/unsqueeze.hpp>

#include <vendor.h>

namespace shiplap::backend::helpers {

inline Node cast(Node value, at::ScalarType to) { return convert(value, to); }
inline Node number(const at::Scalar& value, at::ScalarType as) { return constant(value, as); }
// The CPU plugin crashes on a broadcast to no dims.
inline Node full(at::IntArrayRef sizes, Node value) { return sizes.empty() ? value : make<ov::op::v3::Broadcast>(value, constant(sizes)); }
inline Node reshaped(Node value, at::IntArrayRef sizes) { return make<ov::op::v1::Reshape>(value, constant(sizes), false); }
inline Node unsqueezed(Node value, at::IntArrayRef axes) { return make<ov::op::v0::Unsqueeze>(value, constant(axes)); }
// 0, 1, ... n - 1 along `dim` of `rank` dims; the others are 1.
inline Node positions(int64_t n, int64_t dim, int64_t rank) {
  auto zero = constant(at::Scalar(0), at::kLong), count = constant(at::Scalar(n), at::kLong), one = constant(at::Scalar(1), at::kLong);
  std::vector<int64_t> sizes(rank, 1);
  sizes[dim] = n;
  return reshaped(make<ov::op::v4::Range>(zero, count, one, ov::element::i64), sizes);
}

// [a, b, ...] with two leading dims exchanged.
inline Node exchanged(Node value) {
  std::vector<int64_t> order(value.get_shape().size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
  std::swap(order[0], order[1]);
  return make<ov::op::v1::Transpose>(value, constant(order));
}

// [groups, first / groups, ...] of [first, ...]
inline Node grouped(Node weight, int64_t groups) {
  auto s = sizes(weight);
  s[0] /= groups;
  s.insert(s.begin(), groups);
  return reshaped(weight, s);
}

// A kernel of one pixel, as a product: the plugin's convolution would reorder the whole image into blocks and back. A permuted
// (channels last) image needs no reordering there, and few pixels make a thin product.
inline bool is_product(const Node& input, const Node& weight, at::IntArrayRef padding) {
  auto w = sizes(weight), x = sizes(input);
  auto one = std::all_of(w.begin() + 2, w.end(), [](int64_t n) { return n == 1; });
  auto bare = std::all_of(padding.begin(), padding.end(), [](int64_t n) { return n == 0; });
  auto pixels = std::accumulate(x.begin() + 2, x.end(), int64_t{1}, std::multiplies<>());
  return one && bare && pixels >= 128 && !ov::is_type<ov::op::v1::Transpose>(input.get_node());
}
inline Node as_product(Node input, Node weight, at::IntArrayRef stride) {
  if (std::any_of(stride.begin(), stride.end(), [](int64_t n) { return n != 1; })) {
    auto end = sizes(input);
    std::vector<int64_t> begin(end.size(), 0), step{1, 1};
    step.insert(step.end(), stride.begin(), stride.end());
    input = make<ov::op::v8::Slice>(input, constant(begin), constant(end), constant(step));
  }
  auto shape = sizes(input), w = sizes(weight);
  Node product = make<ov::op::v0::MatMul>(reshaped(weight, {w[0], w[1]}), reshaped(input, {shape[0], shape[1], -1}));
  shape[1] = w[0];
  return reshaped(product, shape);
}

inline Node convolution(Node input, Node weight, at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups) {
  ov::Strides strides(stride.begin(), stride.end()), dilations(dilation.begin(), dilation.end());
  ov::CoordinateDiff pads(padding.begin(), padding.end()), extra(output_padding.begin(), output_padding.end());
  if (groups == 1 && !transposed && is_product(input, weight, padding)) return as_product(input, weight, stride);
  if (groups == 1 && !transposed) return make<ov::op::v1::Convolution>(input, weight, strides, pads, pads, dilations);
  if (!transposed) return make<ov::op::v1::GroupConvolution>(input, grouped(weight, groups), strides, pads, pads, dilations);
  auto automatic = ov::op::PadType::EXPLICIT;
  if (groups == 1) return make<ov::op::v1::ConvolutionBackpropData>(input, weight, strides, pads, pads, dilations, automatic, extra);
  return make<ov::op::v1::GroupConvolutionBackpropData>(input, grouped(weight, groups), strides, pads, pads, dilations, automatic, extra);
}

// `value` with [1, n, 1, ...] added: a bias for each channel.
inline Node biased(Node value, Node bias) {
  std::vector<int64_t> sizes(value.get_shape().size(), 1);
  sizes[1] = -1;
  return make<ov::op::v1::Add>(value, reshaped(bias, sizes));
}

// Gradient of a convolution's input: the transposed convolution, padded out to the input's sizes.
inline Node convolution_input(Node grad, Node weight, at::IntArrayRef input, at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups) {
  std::vector<int64_t> extra;
  auto g = sizes(grad), w = sizes(weight);
  for (size_t d = 0; d < stride.size(); ++d) {
    extra.push_back(input[d + 2] - ((g[d + 2] - 1) * stride[d] - 2 * padding[d] + dilation[d] * (w[d + 2] - 1) + 1));
  }
  return convolution(grad, weight, stride, padding, dilation, true, extra, groups);
}

// Gradient of a convolution's weight: batch and channels change places, stride and dilation too.
inline Node convolution_weight(Node grad, Node input, at::IntArrayRef weight, at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups) {
  auto x = sizes(input), g = sizes(grad);
  auto n = x[0];
  std::vector<int64_t> split{n, groups, x[1] / groups}, joined{x[1] / groups, groups * n}, filters{n, groups, g[1] / groups};
  std::vector<int64_t> order{2, 1, 0}, filter_order{1, 2, 0};
  for (size_t d = 2; d < x.size(); ++d) {
    split.push_back(x[d]);
    joined.push_back(x[d]);
    filters.push_back(g[d]);
    order.push_back(static_cast<int64_t>(d) + 1);
    filter_order.push_back(static_cast<int64_t>(d) + 1);
  }
  Node data = reshaped(make<ov::op::v1::Transpose>(reshaped(input, split), constant(order)), joined);
  Node kernel = make<ov::op::v1::Transpose>(reshaped(grad, filters), constant(filter_order));
  ov::Strides strides(dilation.begin(), dilation.end()), dilations(stride.begin(), stride.end());
  ov::CoordinateDiff pads(padding.begin(), padding.end());
  Node result = make<ov::op::v1::GroupConvolution>(data, kernel, strides, pads, pads, dilations);
  std::vector<int64_t> begin(x.size(), 0), step(x.size(), 1), end = sizes(result);
  for (size_t d = 2; d < x.size(); ++d) end[d] = weight[d];
  return exchanged(make<ov::op::v8::Slice>(result, constant(begin), constant(end), constant(step)));
}

// `value` times a number for each channel.
inline Node channels(Node value, Node factor) {
  std::vector<int64_t> sizes(value.get_shape().size(), 1);
  sizes[1] = -1;
  return make<ov::op::v1::Multiply>(value, reshaped(factor, sizes));
}

inline Node per_channel(Node value, int64_t rank) {
  std::vector<int64_t> sizes(rank, 1);
  sizes[1] = -1;
  return reshaped(value, sizes);
}

inline std::vector<int64_t> every_axis(const Node& value) {
  std::vector<int64_t> axes(value.get_shape().size());
  std::iota(axes.begin(), axes.end(), 0);
  return axes;
}

// A sum over `axes` (kept). The plugin adds one after another, which loses digits of long sums: those are formed in stages.
inline Node sum_of(Node value, at::IntArrayRef axes) {
  constexpr int64_t kLong = 4096, kBlock = 512;
  int64_t count = 1;
  for (auto a : axes) count *= sizes(value)[a];
  if (count <= kLong) return make<ov::op::v1::ReduceSum>(value, constant(axes), true);
  for (auto a : axes) {
    auto n = sizes(value)[a], blocks = (n + kBlock - 1) / kBlock;
    if (n > kLong) {
      std::vector<int64_t> before(sizes(value).size(), 0), behind = before;
      behind[a] = blocks * kBlock - n;
      if (behind[a]) value = make<ov::op::v12::Pad>(value, constant(before), constant(behind), constant(at::Scalar(0.0), dtype(value)), ov::op::PadMode::CONSTANT);
      auto split = sizes(value);
      split[a] = blocks;
      split.insert(split.begin() + a + 1, kBlock);
      value = sum_of(make<ov::op::v1::ReduceSum>(reshaped(value, split), constant({a + 1}), false), {a});
    } else {
      value = make<ov::op::v1::ReduceSum>(value, constant({a}), true);
    }
  }
  return value;
}
inline Node mean_of(Node value, at::IntArrayRef axes) {
  int64_t count = 1;
  for (auto a : axes) count *= sizes(value)[a];
  return make<ov::op::v1::Divide>(sum_of(value, axes), constant(at::Scalar(static_cast<double>(count)), dtype(value)));
}
inline Node total_of(Node value, bool mean) {
  auto axes = every_axis(value);
  return mean ? mean_of(value, axes) : sum_of(value, axes);
}

// The plugin compares int32 in float32: exact if one of the two is 0.
inline Node equal(Node a, Node b) {
  if (a.get_element_type().is_real()) return make<ov::op::v1::Equal>(a, b);
  return make<ov::op::v1::Equal>(make<ov::op::v1::Subtract>(a, b), constant(at::Scalar(0), dtype(a)));
}

// Numbers in torch's order, in which NaN is the largest: it takes infinity's place, which takes that of the largest finite number.
inline Node ordered(Node value) {
  if (!value.get_element_type().is_real()) return value;
  auto number = [&](double n) { return constant(at::Scalar(n), dtype(value)); };
  auto infinity = number(std::numeric_limits<double>::infinity()), finite = number(std::numeric_limits<float>::max());
  Node below = make<ov::op::v1::Select>(make<ov::op::v1::Equal>(value, infinity), finite, value);
  return make<ov::op::v1::Select>(make<ov::op::v10::IsNaN>(value), infinity, below);
}

// [n] along `dim` of `rank` dims; the others are 1.
inline Node along(Node value, int64_t dim, int64_t rank) {
  std::vector<int64_t> sizes(rank, 1);
  sizes[dim] = -1;
  return reshaped(value, sizes);
}
inline Node flipped(Node value, at::IntArrayRef axes) {
  std::vector<int64_t> last(axes.size(), -1), before(axes.size(), std::numeric_limits<int32_t>::min()), back(axes.size(), -1);
  return make<ov::op::v8::Slice>(value, constant(last), constant(before), constant(back), constant(axes));
}

} // namespace shiplap::backend::helpers
