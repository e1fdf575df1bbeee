// Attention as one graph. Parsed by the generator like helpers.h.
#pragma once

#include <cmath>
#include <optional>

#include <openvino/op/less_eq.hpp>
#include <openvino/op/log.hpp>
#include <openvino/op/matmul.hpp>

#include <helpers.h>
#include <helpers_nan.h>

namespace shiplap::backend::helpers {

static Node scaling(const Node& query, std::optional<double> scale) {
  auto factor = scale.value_or(1.0 / std::sqrt(static_cast<double>(sizes(query).back())));
  return constant(at::Scalar(factor), dtype(query));
}
// query @ key.T, scaled, masked: `mask` is added, or there is none; `causal` lets no position see a later one.
static Node scores(Node query, Node key, const std::vector<Node>& mask, bool causal, std::optional<double> scale) {
  Node s = make<ov::op::v0::MatMul>(make<ov::op::v1::Multiply>(query, scaling(query, scale)), key, false, true);
  if (!mask.empty()) s = make<ov::op::v1::Add>(s, mask[0]);
  if (causal) {
    auto seen = make<ov::op::v1::LessEqual>(positions(sizes(key)[2], 3, 4), positions(sizes(query)[2], 2, 4));
    s = make<ov::op::v1::Select>(seen, s, constant(at::Scalar(-std::numeric_limits<double>::infinity()), dtype(s)));
  }
  return s;
}
// Rows that see nothing are 0: `sign` of such a row is `nothing`.
static Node where_seen(Node sign, double nothing, Node value) {
  auto never = constant(at::Scalar(nothing), dtype(sign));
  return make<ov::op::v1::Select>(make<ov::op::v1::Equal>(sign, never), constant(at::Scalar(0), dtype(value)), value);
}

// The result, and the logarithm of each row's sum.
inline std::vector<Node> attention(Node query, Node key, Node value, std::vector<Node> mask, bool causal, std::optional<double> scale) {
  Node s = scores(query, key, mask, causal, scale);
  Node top = make<ov::op::v1::ReduceMax>(s, constant({3}), true);  // finite: the plugin starts from the lowest number
  Node weights = Exp(make<ov::op::v1::Subtract>(s, top));
  Node total = make<ov::op::v1::ReduceSum>(weights, constant({3}), true);
  Node result = make<ov::op::v1::Divide>(make<ov::op::v0::MatMul>(weights, value), total);
  return {where_seen(total, 0, result), make<ov::op::v1::Add>(top, make<ov::op::v0::Log>(total))};
}

// Gradients of query, key and value.
inline std::vector<Node> attention_gradients(Node grad, Node query, Node key, Node value, Node result, Node log_sum, std::vector<Node> mask, bool causal, std::optional<double> scale) {
  Node rows = unsqueezed(log_sum, {3});
  Node weights = where_seen(rows, -std::numeric_limits<double>::infinity(), Exp(make<ov::op::v1::Subtract>(scores(query, key, mask, causal, scale), rows)));
  Node through = make<ov::op::v0::MatMul>(grad, value, false, true);
  Node mean = make<ov::op::v1::ReduceSum>(make<ov::op::v1::Multiply>(grad, result), constant({3}), true);
  Node slope = make<ov::op::v1::Multiply>(make<ov::op::v1::Multiply>(weights, make<ov::op::v1::Subtract>(through, mean)), scaling(query, scale));
  return {make<ov::op::v0::MatMul>(slope, key), make<ov::op::v0::MatMul>(slope, query, true, false), make<ov::op::v0::MatMul>(weights, grad, true, false)};
}

}  // namespace shiplap::backend::helpers
