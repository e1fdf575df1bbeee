// The largest and the smallest, as torch finds them. Parsed by the generator like helpers.h.
#pragma once

#include <openvino/op/reduce_logical_and.hpp>

#include <helpers.h>

namespace shiplap::backend::helpers {

// Over `axes` (kept). The plugin starts from the largest finite number, which nothing but infinities does not fall below, and passes
// over NaN.
inline Node extremum(Node value, at::IntArrayRef axes, std::string_view mode) {
  auto over = constant(axes);
  Node best = mode == "max" ? make<ov::op::v1::ReduceMax>(value, over, true) : make<ov::op::v1::ReduceMin>(value, over, true);
  if (!value.get_element_type().is_real()) return best;
  auto bound = std::numeric_limits<double>::infinity();
  auto start = constant(at::Scalar(mode == "max" ? -bound : bound), dtype(value));
  best = make<ov::op::v1::Select>(make<ov::op::v1::ReduceLogicalAnd>(make<ov::op::v1::Equal>(value, start), over, true), start, best);
  auto any_nan = make<ov::op::v1::ReduceLogicalOr>(make<ov::op::v10::IsNaN>(value), over, true);
  return make<ov::op::v1::Select>(any_nan, make<ov::op::v1::ReduceSum>(value, over, true), best);
}

// Index of the first along one axis (kept), or of the flattened value if there are more. NaN is an extremum.
inline Node extremum_index(Node value, at::IntArrayRef axes, std::string_view mode) {
  auto axis = axes.size() == 1 ? axes[0] : 0;
  if (axes.size() != 1) value = reshaped(value, {-1});
  auto n = sizes(value)[axis];
  Node best = extremum(value, {axis}, mode), hit = make<ov::op::v1::Equal>(value, best);
  if (value.get_element_type().is_real()) hit = make<ov::op::v1::Select>(make<ov::op::v10::IsNaN>(best), make<ov::op::v10::IsNaN>(value), hit);
  auto place = convert(positions(n, axis, static_cast<int64_t>(value.get_shape().size())), at::kInt);
  return make<ov::op::v1::ReduceMin>(make<ov::op::v1::Select>(hit, place, constant(at::Scalar(n), at::kInt)), constant({axis}), true);
}

}  // namespace shiplap::backend::helpers
