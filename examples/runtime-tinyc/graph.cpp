#include <ATen/ExpandUtils.h>
#include <c10/util/accumulate.h>
#include <functions.h>
#include <tinyc.h>

#include <algorithm>
#include <unordered_map>

namespace shiplap::backend {
namespace {

int64_t count(const Sizes& sizes) { return c10::multiply_integers(sizes); }
Sizes sizes_of(const Port& p) { return {p.sizes.begin(), p.sizes.end()}; }

Sizes dense(const Sizes& sizes) {
  Sizes strides(sizes.size(), 1);
  for (auto d = sizes.size(); d-- > 1;) strides[d - 1] = strides[d] * sizes[d];
  return strides;
}

void copy(const float* in, const Sizes& in_strides, float* out, const Sizes& out_strides, const Sizes& sizes) {
  tinyc_copy(in, in_strides.data(), out, out_strides.data(), sizes.data(), static_cast<int64_t>(sizes.size()));
}

Node term(Sizes sizes, std::vector<Node> operands, decltype(Term::compute) compute) {
  return std::make_shared<Term>(Term{std::move(sizes), std::move(operands), std::move(compute)});
}

// A graph that was built. Several threads may run it at a time, so what it computes is local to `run`.
class Compiled final : public Executable {
 public:
  explicit Compiled(Graph graph) : graph_(std::move(graph)) {}

  void run(c10::ArrayRef<const void*> inputs, c10::ArrayRef<void*> outputs) override {
    Values values;
    for (size_t i = 0; i < inputs.size(); ++i) {
      auto& [sizes, operands, compute] = *graph_.inputs[i];
      auto& value = values[graph_.inputs[i].get()];
      value.resize(count(sizes));
      copy(static_cast<const float*>(inputs[i]), graph_.signature.inputs[i].strides(), value.data(), dense(sizes), sizes);
    }
    for (size_t i = 0; i < outputs.size(); ++i) {
      auto& port = graph_.signature.outputs[i];
      auto sizes = sizes_of(port);
      copy(value_of(graph_.results[i], values), dense(sizes), static_cast<float*>(outputs[i]), port.strides(), sizes);
    }
  }

 private:
  using Values = std::unordered_map<const Term*, std::vector<float>>;

  static const float* value_of(const Node& node, Values& values) {
    if (auto known = values.find(node.get()); known != values.end()) return known->second.data();
    std::vector<const float*> operands;
    for (const auto& o : node->operands) operands.push_back(value_of(o, values));
    std::vector<float> value(count(node->sizes));
    node->compute(operands, value.data());
    return (values[node.get()] = std::move(value)).data();
  }

  Graph graph_;
};

}  // namespace

Graph::Graph(const Signature& s) : signature(s), results(s.outputs.size()) {
  auto check = [&](const Port& p) {
    TORCH_CHECK_NOT_IMPLEMENTED(p.dtype == at::kFloat && p.block == 0, s.op, ": tinyc has float32 only, got ", p.dtype);
  };
  for (const auto& p : s.inputs) {
    check(p);
    inputs.push_back(term(sizes_of(p), {}, {}));
  }
  for (const auto& p : s.outputs) check(p);
}

// The sizes of a value may differ from those of the output by dims of 1; a constant is repeated.
void Graph::output(size_t i, Node value) {
  auto sizes = sizes_of(signature.outputs[i]);
  results[i] = count(value->sizes) == count(sizes) ? value : expand(value, sizes);
}

Node constant(const at::Scalar& value, at::ScalarType) {
  return term({}, {}, [v = value.toFloat()](const auto&, float* out) { *out = v; });
}

Node expand(const Node& value, const Sizes& sizes) {
  if (value->sizes == sizes) return value;
  auto strides = std::get<1>(at::inferExpandGeometry(value->sizes, dense(value->sizes), sizes));
  return term(sizes, {value}, [=](const auto& in, float* out) { copy(in[0], strides, out, dense(sizes), sizes); });
}

std::shared_ptr<Executable> compile(const Signature& signature, c10::function_ref<void(Graph&)> emit) {
  Graph graph(signature);
  emit(graph);
  return std::make_shared<Compiled>(std::move(graph));
}

namespace functions {

Node binary(Node a, Node b, int64_t op) {
  auto sizes = at::infer_size(a->sizes, b->sizes);
  return term(sizes, {expand(a, sizes), expand(b, sizes)}, [op, n = count(sizes)](const auto& in, float* out) {
    tinyc_binary(static_cast<char>(op), in[0], in[1], out, n);
  });
}

Node unary(Node a, int64_t f) {
  return term(a->sizes, {a}, [f, n = count(a->sizes)](const auto& in, float* out) {
    tinyc_unary(static_cast<char>(f), in[0], out, n);
  });
}

Node MatMul(Node a, Node b) {
  auto rows = a->sizes[0], inner = a->sizes[1], columns = b->sizes[1];
  return term({rows, columns}, {a, b}, [=](const auto& in, float* out) {
    tinyc_matmul(in[0], in[1], out, rows, inner, columns);
  });
}

Node Sum(Node a, std::vector<int64_t> axes) {
  auto kept = a->sizes;
  for (auto d : axes) kept[d] = 1;
  auto strides = dense(kept);
  for (auto d : axes) strides[d] = 0;
  return term(kept, {a}, [=, sizes = a->sizes](const auto& in, float* out) {  // `out` begins as zeros
    tinyc_add_to(in[0], out, strides.data(), sizes.data(), static_cast<int64_t>(sizes.size()));
  });
}

}  // namespace functions
}  // namespace shiplap::backend
