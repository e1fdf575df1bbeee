// oneDNN's side of the contract: a graph is a list of primitives, a node a value that one of them writes.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <c10/core/Scalar.h>
#include <c10/util/ArrayRef.h>
#include <dnnl.hpp>

#include <shiplap_backend/signature.h>

namespace shiplap::backend {

// A value of the graph being built. There is one such graph a thread, so a node needs no pointer to it.
struct Node {
  size_t id = SIZE_MAX;
};

// Where the bytes of a value are during one execution.
struct Value {
  enum Home { kInput, kOutput, kScratch, kConstant } home;
  size_t index; // of the port; for scratch and constants unused
  at::ScalarType dtype;
  dnnl::memory::desc desc; // 0-dim tensors have one dim of 1
  bool scalar; // a 0-dim tensor
  std::vector<char> bytes; // of a constant
};

struct Step {
  dnnl::primitive primitive;
  std::vector<std::pair<int, size_t>> arguments; // DNNL_ARG_* and value
};

class Graph {
 public:
  explicit Graph(const Signature& signature);

  Node input(size_t i) const;
  Node input(size_t i, at::ScalarType as);
  size_t size() const { return inputs_.size(); }
  void output(size_t i, Node value);

  Node add(Value value);
  // A scratch value that `primitive` will write.
  Node scratch(const dnnl::memory::desc& desc, at::ScalarType dtype, bool scalar = false);
  void step(dnnl::primitive primitive, std::vector<std::pair<int, size_t>> arguments);
  const Value& operator[](Node n) const { return values_[n.id]; }

  std::vector<Value> values_;
  std::vector<Step> steps_;

 private:
  const Signature& signature_;
  std::vector<Node> inputs_;
};

Graph& building(); // the graph that this thread builds
dnnl::engine& engine();
dnnl::memory::data_type vendor_type(at::ScalarType t);
dnnl::memory::desc dense(const dnnl::memory::dims& dims, at::ScalarType t);

Node convert(Node value, at::ScalarType to);
Node constant(const at::Scalar& value, at::ScalarType dtype);
at::ScalarType dtype(Node node);
std::vector<int64_t> sizes(Node node);

} // namespace shiplap::backend
