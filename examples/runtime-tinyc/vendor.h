// tinyc's side of the contract: a node is a value that is still to be computed, a graph is what it is computed from.
#pragma once

#include <c10/core/Scalar.h>
#include <c10/util/Exception.h>
#include <shiplap_backend/signature.h>

#include <functional>
#include <memory>
#include <vector>

namespace shiplap::backend {

using Sizes = std::vector<int64_t>;

struct Term {
  Sizes sizes;
  std::vector<std::shared_ptr<Term>> operands;
  std::function<void(const std::vector<const float*>& operands, float* out)> compute;  // none: an input
};
using Node = std::shared_ptr<Term>;

class Graph {
 public:
  explicit Graph(const Signature& signature);
  Node input(size_t i) const { return inputs[i]; }
  Node input(size_t i, at::ScalarType) const { return inputs[i]; }  // all is float32: the metadata sees to that
  void output(size_t i, Node value);

  Signature signature;
  std::vector<Node> inputs, results;
};

inline Node convert(Node value, at::ScalarType) { return value; }
Node constant(const at::Scalar& value, at::ScalarType dtype);
Node expand(const Node& value, const Sizes& sizes);

}  // namespace shiplap::backend
