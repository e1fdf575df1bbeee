#include <vendor.h>

#include <functions.h>

#include <algorithm>
#include <numeric>
#include <unordered_map>

#include <c10/util/Exception.h>

namespace shiplap::backend {

using dnnl::memory;

namespace {

thread_local Graph* current = nullptr;

memory::dims at_least_1d(at::IntArrayRef sizes) {
  return sizes.empty() ? memory::dims{1} : memory::dims(sizes.begin(), sizes.end());
}

memory::dims row_major(const memory::dims& dims) {
  memory::dims strides(dims.size(), 1);
  for (size_t d = dims.size(); d-- > 1;) {
    strides[d - 1] = strides[d] * std::max<int64_t>(dims[d], 1);
  }
  return strides;
}

// The memory of a port as oneDNN sees it: dims of the tensor (1 where it is expanded), strides of the memory.
memory::desc port_desc(const Port& p) {
  TORCH_CHECK_NOT_IMPLEMENTED(p.block == 0, "the oneDNN runtime has no blocked layout");
  if (p.sizes.empty()) {
    return dense({1}, p.dtype);
  }
  memory::dims dims(p.sizes.size()), strides(p.sizes.size());
  auto physical = row_major(memory::dims(p.stored.begin(), p.stored.end()));
  for (size_t i = 0; i < p.stored.size(); ++i) {
    dims[p.order[i]] = p.stored[i];
    strides[p.order[i]] = physical[i];
  }
  return {dims, vendor_type(p.dtype), strides};
}

} // namespace

dnnl::engine& engine() {
  static auto* e = new dnnl::engine(dnnl::engine::kind::cpu, 0);
  return *e;
}

memory::data_type vendor_type(at::ScalarType t) {
  switch (t) {
    case at::kFloat: return memory::data_type::f32;
    case at::kBFloat16: return memory::data_type::bf16;
    case at::kInt: return memory::data_type::s32;
    case at::kChar: return memory::data_type::s8;
    case at::kByte: case at::kBool: return memory::data_type::u8;
    default: TORCH_CHECK_NOT_IMPLEMENTED(false, "oneDNN has no data type for ", t, ": the metadata of this op must exclude it");
  }
}

memory::desc dense(const memory::dims& dims, at::ScalarType t) {
  return {dims, vendor_type(t), row_major(dims)};
}

// --- building ----------------------------------------------------------------------------------------------------

Graph& building() {
  TORCH_INTERNAL_ASSERT(current != nullptr, "a node outside a graph");
  return *current;
}

Graph::Graph(const Signature& signature) : signature_(signature) {
  current = this;
  for (size_t i = 0; i < signature.inputs.size(); ++i) {
    const auto& p = signature.inputs[i];
    auto node = add({Value::kInput, i, p.dtype, port_desc(p), p.sizes.empty(), {}});
    memory::dims full = at_least_1d(p.sizes);
    if (values_[node.id].desc.get_dims() != full) { // expanded: added to zeros of the full size
      Value zeros{Value::kConstant, 0, at::kFloat, dense(full, at::kFloat), false, {}};
      zeros.bytes.resize(zeros.desc.get_size());
      node = functions::binary(add(std::move(zeros)), convert(node, at::kFloat), "add");
      node = convert(node, p.dtype);
    }
    inputs_.push_back(node);
  }
}

Node Graph::input(size_t i) const {
  TORCH_INTERNAL_ASSERT(i < inputs_.size(), signature_.op, ": input ", i, " of ", inputs_.size());
  return inputs_[i];
}

Node Graph::input(size_t i, at::ScalarType as) {
  return convert(input(i), as);
}

Node Graph::add(Value value) {
  values_.push_back(std::move(value));
  return {values_.size() - 1};
}

Node Graph::scratch(const memory::desc& desc, at::ScalarType dtype, bool scalar) {
  return add({Value::kScratch, 0, dtype, desc, scalar, {}});
}

void Graph::step(dnnl::primitive primitive, std::vector<std::pair<int, size_t>> arguments) {
  steps_.push_back({std::move(primitive), std::move(arguments)});
}

void Graph::output(size_t i, Node value) {
  const auto& p = signature_.outputs[i];
  value = convert(value, p.dtype);
  auto target = port_desc(p);
  auto from = values_[value.id].desc;
  auto count = [](const memory::dims& d) { return std::accumulate(d.begin(), d.end(), int64_t{1}, std::multiplies<>()); };
  TORCH_INTERNAL_ASSERT(
      count(from.get_dims()) == count(target.get_dims()), signature_.op, ": the graph computes ", count(from.get_dims()),
      " values for output ", i, ", torch expects sizes ", at::IntArrayRef(p.sizes));
  if (from.get_dims() != target.get_dims()) { // dims of 1 come and go
    from = from.reshape(target.get_dims());
    auto same = value;
    value = add(values_[same.id]);
    values_[value.id].desc = from;
    if (values_[same.id].home == Value::kScratch) {
      values_[value.id].index = same.id + 1; // the same bytes
    }
  }
  auto out = add({Value::kOutput, i, p.dtype, target, p.sizes.empty(), {}});
  step(dnnl::reorder({engine(), from, engine(), target}), {{DNNL_ARG_FROM, value.id}, {DNNL_ARG_TO, out.id}});
}

Node convert(Node value, at::ScalarType to) {
  auto& g = building();
  const auto from = g[value];
  if (from.dtype == to) {
    return value;
  }
  if (to == at::kBool) { // comparisons give 0 and 1
    value = functions::binary(convert(value, at::kFloat), constant(at::Scalar(0.0), at::kFloat), "ne");
  }
  auto result = g.scratch(dense(g[value].desc.get_dims(), to), to, from.scalar);
  g.step(dnnl::reorder({engine(), g[value].desc, engine(), g[result].desc}), {{DNNL_ARG_FROM, value.id}, {DNNL_ARG_TO, result.id}});
  return result;
}

Node constant(const at::Scalar& value, at::ScalarType dtype) {
  TORCH_CHECK_NOT_IMPLEMENTED(dtype == at::kFloat, "the oneDNN runtime has constants of float32 only");
  Value v{Value::kConstant, 0, dtype, dense({1}, dtype), true, std::vector<char>(sizeof(float))};
  auto number = static_cast<float>(value.toDouble());
  std::memcpy(v.bytes.data(), &number, sizeof(number));
  return building().add(std::move(v));
}

at::ScalarType dtype(Node node) {
  return building()[node].dtype;
}

std::vector<int64_t> sizes(Node node) {
  const auto& v = building()[node];
  return v.scalar ? std::vector<int64_t>{} : v.desc.get_dims();
}

// --- execution ---------------------------------------------------------------------------------------------------

namespace {

class Compiled final : public Executable {
 public:
  explicit Compiled(Graph graph) : values_(std::move(graph.values_)), steps_(std::move(graph.steps_)) {}

  void run(c10::ArrayRef<const void*> inputs, c10::ArrayRef<void*> outputs) override {
    thread_local dnnl::stream stream(engine());
    std::vector<std::vector<char>> scratch(values_.size());
    std::vector<void*> at(values_.size());
    for (size_t i = 0; i < values_.size(); ++i) {
      at[i] = address(i, inputs, outputs, scratch, at);
    }
    for (const auto& s : steps_) {
      std::unordered_map<int, memory> arguments;
      for (auto [role, id] : s.arguments) {
        arguments.emplace(role, memory(values_[id].desc, engine(), at[id]));
      }
      s.primitive.execute(stream, arguments);
    }
    stream.wait();
  }

 private:
  void* address(
      size_t i, c10::ArrayRef<const void*> inputs, c10::ArrayRef<void*> outputs, std::vector<std::vector<char>>& scratch,
      const std::vector<void*>& at) {
    auto& v = values_[i];
    switch (v.home) {
      case Value::kInput: return const_cast<void*>(inputs[v.index]);
      case Value::kOutput: return outputs[v.index];
      case Value::kConstant: return v.bytes.data();
      default:
        if (v.index > 0) {
          return at[v.index - 1];
        }
        scratch[i].resize(v.desc.get_size());
        return scratch[i].data();
    }
  }

  std::vector<Value> values_;
  std::vector<Step> steps_;
};

} // namespace

std::shared_ptr<Executable> compile(const Signature& signature, c10::function_ref<void(Graph&)> emit) {
  struct Building {
    Graph* before = current;
    ~Building() { current = before; }
  } restore;
  try {
    Graph graph(signature);
    current = &graph;
    emit(graph);
    return std::make_shared<Compiled>(std::move(graph));
  } catch (const dnnl::error& e) {
    TORCH_CHECK(false, signature.op, ": oneDNN refuses the graph: ", e.what());
  }
}

} // namespace shiplap::backend
