#include <functions.h>
#include <tinyc.h>

#include <algorithm>
#include <unordered_map>

namespace shiplap::backend {
namespace {

int64_t count(const Sizes& sizes) {
  int64_t n = 1;
  for (auto s : sizes) n *= s;
  return n;
}

Sizes dense(const Sizes& sizes) {
  Sizes strides(sizes.size(), 1);
  for (auto d = sizes.size(); d-- > 1;) strides[d - 1] = strides[d] * sizes[d];
  return strides;
}

// Strides of the tensor's dims in the memory that a port describes; 0 where a dim is expanded.
Sizes strides_of(const Port& p) {
  auto physical = dense({p.stored.begin(), p.stored.end()});
  Sizes strides(p.sizes.size());
  for (size_t i = 0; i < strides.size(); ++i) {
    strides[p.order[i]] = p.stored[i] == p.sizes[p.order[i]] ? physical[i] : 0;
  }
  return strides;
}

Sizes sizes_of(const Port& p) { return {p.sizes.begin(), p.sizes.end()}; }

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
      const auto& sizes = graph_.inputs[i]->sizes;
      auto& value = values[graph_.inputs[i].get()];
      value.resize(count(sizes));
      tinyc_copy(static_cast<const float*>(inputs[i]), strides_of(graph_.signature.inputs[i]).data(), value.data(),
                 dense(sizes).data(), sizes.data(), static_cast<int64_t>(sizes.size()));
    }
    for (size_t i = 0; i < outputs.size(); ++i) {
      auto sizes = sizes_of(graph_.signature.outputs[i]);
      tinyc_copy(value_of(graph_.results[i], values), dense(sizes).data(), static_cast<float*>(outputs[i]),
                 strides_of(graph_.signature.outputs[i]).data(), sizes.data(), static_cast<int64_t>(sizes.size()));
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
  Sizes strides(sizes.size(), 0), own = dense(value->sizes);
  for (size_t d = 0; d < own.size(); ++d) {
    if (value->sizes[d] != 1) strides[sizes.size() - own.size() + d] = own[d];
  }
  return term(sizes, {value}, [=](const auto& in, float* out) {
    tinyc_copy(in[0], strides.data(), out, dense(sizes).data(), sizes.data(), static_cast<int64_t>(sizes.size()));
  });
}

std::shared_ptr<Executable> compile(const Signature& signature, c10::function_ref<void(Graph&)> emit) {
  Graph graph(signature);
  emit(graph);
  return std::make_shared<Compiled>(std::move(graph));
}

namespace functions {

Node binary(Node a, Node b, int64_t op) {
  auto &longer = a->sizes.size() < b->sizes.size() ? b->sizes : a->sizes, &other = &longer == &a->sizes ? b->sizes : a->sizes;
  Sizes sizes = longer;
  for (size_t d = 1; d <= other.size(); ++d) {
    auto& s = sizes[sizes.size() - d];
    s = s == 1 ? other[other.size() - d] : s;
  }
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
