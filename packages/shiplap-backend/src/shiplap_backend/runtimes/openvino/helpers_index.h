// Advanced indexing: several indices at once. Parsed by the generator like helpers.h.
#pragma once

#include <openvino/op/concat.hpp>
#include <openvino/op/gather_nd.hpp>
#include <openvino/op/less.hpp>
#include <openvino/op/scatter_nd_update.hpp>

#include <helpers.h>

namespace shiplap::backend::helpers {

// Broadcast, as torch broadcasts.
static void broaden(std::vector<int64_t>& shape, at::IntArrayRef by) {
  if (by.size() > shape.size()) shape.insert(shape.begin(), by.size() - shape.size(), 1);
  for (size_t i = 0; i < by.size(); ++i) {
    auto& n = shape[shape.size() - by.size() + i];
    n = n == 1 ? by[i] : n;
  }
}
// Indices of neighbouring dims leave their result in their place, others put it first.
static int64_t result_place(const std::vector<int64_t>& dims) {
  return dims.back() - dims.front() + 1 == static_cast<int64_t>(dims.size()) ? dims.front() : 0;
}
inline std::vector<int64_t> indexed_sizes(const at::Tensor& t, const c10::List<std::optional<at::Tensor>>& indices) {
  std::vector<int64_t> dims, shape, out;
  for (int64_t d = 0; d < t.dim(); ++d) {
    auto index = d < static_cast<int64_t>(indices.size()) ? indices.get(d) : std::nullopt;
    if (index.has_value() && index->defined()) {
      dims.push_back(d);
      broaden(shape, index->sizes());
    } else {
      out.push_back(t.size(d));
    }
  }
  out.insert(out.begin() + result_place(dims), shape.begin(), shape.end());
  return out;
}

// What several indices mean: the indexed dims first, and for each element its coordinates there.
struct Addressed {
  std::vector<int64_t> front;  // the order of dims that puts the indexed ones first
  std::vector<int64_t> shape;  // that the indices have in common
  int64_t first = 0;           // where `shape` stands among the dims that are left
  Node coordinates;            // [shape..., dims indexed]
};

static Addressed addressed(const std::vector<int64_t>& of, const std::vector<Node>& indices, at::IntArrayRef places) {
  Addressed a;
  std::vector<int64_t> dims, rest;
  for (int64_t d = 0; d < static_cast<int64_t>(of.size()); ++d) (d < static_cast<int64_t>(places.size()) && places[d] ? dims : rest).push_back(d);
  a.front = dims;
  a.front.insert(a.front.end(), rest.begin(), rest.end());
  a.first = result_place(dims);
  for (const auto& index : indices) broaden(a.shape, sizes(index));
  ov::OutputVector columns;
  for (size_t i = 0; i < indices.size(); ++i) {
    auto zero = constant(at::Scalar(0), at::kInt), n = constant(at::Scalar(of[dims[i]]), at::kInt);
    Node wrapped = make<ov::op::v1::Select>(make<ov::op::v1::Less>(indices[i], zero), make<ov::op::v1::Add>(indices[i], n), indices[i]);
    columns.push_back(unsqueezed(full(a.shape, wrapped), {static_cast<int64_t>(a.shape.size())}));
  }
  a.coordinates = make<ov::op::v0::Concat>(columns, static_cast<int64_t>(a.shape.size()));
  return a;
}

// Dims `begin` to `begin + count` moved to `to`.
static Node moved(Node value, int64_t begin, int64_t count, int64_t to) {
  std::vector<int64_t> order(sizes(value).size());
  std::iota(order.begin(), order.end(), 0);
  if (begin > to) std::rotate(order.begin() + to, order.begin() + begin, order.begin() + begin + count);
  else std::rotate(order.begin() + begin, order.begin() + begin + count, order.begin() + to + count);
  return make<ov::op::v1::Transpose>(value, constant(order));
}

inline Node indexed(Node value, std::vector<Node> indices, at::IntArrayRef places) {
  auto a = addressed(sizes(value), indices, places);
  Node found = make<ov::op::v8::GatherND>(make<ov::op::v1::Transpose>(value, constant(a.front)), a.coordinates);
  return moved(found, 0, static_cast<int64_t>(a.shape.size()), a.first);
}

inline Node index_put(Node value, std::vector<Node> indices, at::IntArrayRef places, Node values, bool accumulate) {
  auto a = addressed(sizes(value), indices, places);
  auto rank = static_cast<int64_t>(a.shape.size());
  Node front = make<ov::op::v1::Transpose>(value, constant(a.front));
  auto result = sizes(front);
  result.erase(result.begin(), result.begin() + static_cast<int64_t>(indices.size()));
  result.insert(result.begin() + a.first, a.shape.begin(), a.shape.end());
  Node updates = moved(full(result, values), a.first, rank, 0);
  auto how = accumulate ? ov::op::v15::ScatterNDUpdate::Reduction::SUM : ov::op::v15::ScatterNDUpdate::Reduction::NONE;
  Node written = make<ov::op::v15::ScatterNDUpdate>(front, a.coordinates, updates, how);
  std::vector<int64_t> back(a.front.size());
  for (size_t i = 0; i < back.size(); ++i) back[a.front[i]] = static_cast<int64_t>(i);
  return make<ov::op::v1::Transpose>(written, constant(back));
}

}  // namespace shiplap::backend::helpers
