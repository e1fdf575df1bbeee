// OpenVINO's side of the contract: a graph is an ov::Model, a node one of its outputs, a vendor
// function an operation's class.
#pragma once

#include <c10/core/Scalar.h>
#include <c10/util/ArrayRef.h>
#include <shiplap_backend/signature.h>

#include <memory>
#include <openvino/core/node.hpp>
#include <openvino/op/parameter.hpp>
#include <openvino/op/result.hpp>
#include <vector>

namespace shiplap::backend {

using Node = ov::Output<ov::Node>;

class Graph {
 public:
  explicit Graph(const Signature& signature);

  // Element type and sizes of the tensor, whatever its layout in memory.
  Node input(size_t i);
  Node input(size_t i, at::ScalarType as);
  size_t size() const { return inputs_.size(); }
  // Converted to the output's dtype; sizes may differ from the output's by dims of 1.
  void output(size_t i, Node value);

  const ov::ParameterVector& parameters() const { return parameters_; }
  const ov::ResultVector& results() const;  // throws if an output was not given

 private:
  const Signature& signature_;
  ov::ParameterVector parameters_;
  std::vector<Node> inputs_;
  ov::ResultVector results_;
};

// torch's rules: float to integer truncates, narrower integers wrap, to bool is `!= 0` (also for
// NaN).
Node convert(Node value, at::ScalarType to);
Node constant(const at::Scalar& value, at::ScalarType dtype);  // 0-dim
Node constant(at::IntArrayRef values);                // 1-dim, int64: axes, shapes, permutations
ov::element::Type vendor_type(at::ScalarType dtype);  // throws if there is none
at::ScalarType dtype(const Node& node);
std::vector<int64_t> sizes(const Node& node);

template <class Op, class... A>
Node make(A&&... arguments) {
  return std::make_shared<Op>(std::forward<A>(arguments)...)->output(0);
}

template <class Op, class... A>
std::vector<Node> makes(A&&... arguments) {
  return std::make_shared<Op>(std::forward<A>(arguments)...)->outputs();
}

}  // namespace shiplap::backend
