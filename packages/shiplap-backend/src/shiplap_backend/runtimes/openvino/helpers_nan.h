// The plugin's operations under their own names, where it has them otherwise than torch: NaN. Parsed by the generator like helpers.h.
#pragma once

#include <openvino/op/exp.hpp>
#include <openvino/op/less.hpp>
#include <openvino/op/less_eq.hpp>
#include <openvino/op/log_softmax.hpp>
#include <openvino/op/sign.hpp>
#include <openvino/op/softmax.hpp>

#include <helpers.h>

namespace shiplap::backend::helpers {

// The plugin's is infinite of NaN.
inline Node Exp(Node value) { return make<ov::op::v1::Select>(make<ov::op::v10::IsNaN>(value), value, make<ov::op::v0::Exp>(value)); }

// True of NaN where the CPU has AVX-512; Less is false on every one.
inline Node Greater(Node left, Node right) { return make<ov::op::v1::Less>(right, left); }
inline Node GreaterEqual(Node left, Node right) { return make<ov::op::v1::LessEqual>(right, left); }

// 0 of NaN.
inline Node Sign(Node value) {
  Node sign = make<ov::op::v0::Sign>(value);
  if (!value.get_element_type().is_real()) return sign;
  return make<ov::op::v1::Select>(make<ov::op::v10::IsNaN>(value), constant(at::Scalar(0), dtype(value)), sign);
}

// NaN or an infinite maximum make NaN of all that is normalised together, and not of their own place alone.
inline Node nan_in_all(Node value, int64_t axis) {
  Node sum = make<ov::op::v1::ReduceSum>(value, constant({axis}), true);
  return make<ov::op::v1::Select>(make<ov::op::v10::IsNaN>(sum), sum, value);
}
inline Node Softmax(Node value, int64_t axis) { return nan_in_all(make<ov::op::v8::Softmax>(value, axis), axis); }
inline Node LogSoftmax(Node value, int64_t axis) { return nan_in_all(make<ov::op::v5::LogSoftmax>(value, axis), axis); }

}  // namespace shiplap::backend::helpers
