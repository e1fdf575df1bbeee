// The graph of vendor.h: it is kept as it was built, and each run computes its values one after the other.
#include <vendor.h>

#include <ATen/Dispatch.h>
#include <ATen/ExpandUtils.h>
#include <c10/util/TypeCast.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <unordered_map>

namespace shiplap::backend {
namespace {

constexpr std::align_val_t kAligned{64};  // a cache line, and the widest vector registers

struct Release {
  void operator()(void* data) const { ::operator delete(data, kAligned); }
};
using Bytes = std::unique_ptr<void, Release>;

Bytes zeros(size_t bytes) {
  Bytes made(::operator new(std::max<size_t>(bytes, 1), kAligned));
  std::memset(made.get(), 0, bytes);
  return made;
}

size_t bytes_of(const Value& v) { return count(v.sizes) * c10::elementSize(v.dtype); }
Sizes sizes_of(const Port& p) { return {p.sizes.begin(), p.sizes.end()}; }

Sizes dense(const Sizes& sizes) {
  Sizes strides(sizes.size(), 1);
  for (auto d = sizes.size(); d-- > 1;) strides[d - 1] = strides[d] * std::max<int64_t>(sizes[d], 1);
  return strides;
}

// A copy between two layouts, given by strides in elements of `item` bytes.
void copy(const char* in, const int64_t* in_strides, char* out, const int64_t* out_strides,
          const int64_t* sizes, size_t rank, int64_t item) {
  if (rank == 0) {
    std::memcpy(out, in, item);
    return;
  }
  if (rank == 1 && *in_strides == 1 && *out_strides == 1) {
    std::memcpy(out, in, *sizes * item);
    return;
  }
  for (int64_t i = 0; i < *sizes; ++i) {
    copy(in + i * *in_strides * item, in_strides + 1, out + i * *out_strides * item, out_strides + 1,
         sizes + 1, rank - 1, item);
  }
}

void copy(const void* in, const Sizes& in_strides, void* out, const Sizes& out_strides,
          const Sizes& sizes, at::ScalarType dtype) {
  copy(static_cast<const char*>(in), in_strides.data(), static_cast<char*>(out), out_strides.data(),
       sizes.data(), sizes.size(), static_cast<int64_t>(c10::elementSize(dtype)));
}

// A value of these sizes, whose elements are those of `value` at `strides`.
Node viewed(const Node& value, Sizes sizes, Sizes strides) {
  auto compute = [=, dtype = value->dtype](c10::ArrayRef<const void*> in, void* out) {
    copy(in[0], strides, out, dense(sizes), sizes, dtype);
  };
  return node(value->dtype, sizes, {value}, compute);
}

// What one run has computed so far. Inputs that lie row-major are read where they are.
class Run {
 public:
  const void* of(const Node& node) {
    if (auto known = values_.find(node.get()); known != values_.end()) return known->second;
    std::vector<const void*> operands;
    for (const auto& o : node->operands) operands.push_back(of(o));
    auto made = zeros(bytes_of(*node));
    node->compute(operands, made.get());
    return keep(node, std::move(made));
  }
  void input(const Node& node, const Port& port, const void* data) {
    if (port.row_major()) {
      values_[node.get()] = data;
      return;
    }
    auto made = zeros(bytes_of(*node));
    copy(data, port.strides(), made.get(), dense(node->sizes), node->sizes, node->dtype);
    keep(node, std::move(made));
  }

 private:
  const void* keep(const Node& node, Bytes made) {
    owned_.push_back(std::move(made));
    return values_[node.get()] = owned_.back().get();
  }
  std::unordered_map<const Value*, const void*> values_;
  std::vector<Bytes> owned_;
};

// Several threads may run it at a time: what it computes is local to `run`.
class Compiled final : public Executable {
 public:
  explicit Compiled(Graph graph) : graph_(std::move(graph)) {}

  void run(c10::ArrayRef<const void*> inputs, c10::ArrayRef<void*> outputs) override {
    const auto& signature = graph_.signature;
    Run run;
    for (size_t i = 0; i < inputs.size(); ++i) run.input(graph_.inputs[i], signature.inputs[i], inputs[i]);
    // An output may lie where an input does: all values are there before the first output is written.
    for (const auto& result : graph_.results) run.of(result);
    for (size_t i = 0; i < outputs.size(); ++i) {
      const auto& port = signature.outputs[i];
      auto sizes = sizes_of(port);
      copy(run.of(graph_.results[i]), dense(sizes), outputs[i], port.strides(), sizes, port.dtype);
    }
  }

 private:
  Graph graph_;
};

Sizes without_ones(Sizes sizes) {
  sizes.erase(std::remove(sizes.begin(), sizes.end(), 1), sizes.end());
  return sizes;
}

}  // namespace

Graph::Graph(const Signature& s) : signature(s), results(s.outputs.size()) {
  for (const auto* ports : {&s.inputs, &s.outputs}) {
    for (const auto& p : *ports) TORCH_CHECK_NOT_IMPLEMENTED(p.block == 0, s.op, ": blocked memory");
  }
  for (const auto& p : s.inputs) inputs.push_back(node(p.dtype, sizes_of(p), {}, nullptr));
}

Node Graph::input(size_t i, at::ScalarType dtype) const { return convert(inputs[i], dtype); }

void Graph::output(size_t i, const Node& value) {
  auto sizes = sizes_of(signature.outputs[i]);
  auto converted = convert(value, signature.outputs[i].dtype);
  if (without_ones(value->sizes) != without_ones(sizes)) {
    TORCH_CHECK(at::is_expandable_to(value->sizes, sizes), signature.op, ": a result of sizes ",
                value->sizes, " for an output of sizes ", sizes);
    converted = expand(converted, sizes);
  }
  results[i] = converted;
}

Node node(at::ScalarType dtype, Sizes sizes, std::vector<Node> operands, Compute compute) {
  Value made{dtype, std::move(sizes), std::move(operands), std::move(compute)};
  return std::make_shared<const Value>(std::move(made));
}

Node convert(const Node& value, at::ScalarType dtype) {
  if (value->dtype == dtype) return value;
  auto compute = [n = count(value->sizes), from = value->dtype, dtype](c10::ArrayRef<const void*> in, void* out) {
    AT_DISPATCH_ALL_TYPES_AND3(at::kHalf, at::kBFloat16, at::kBool, from, "convert", [&] {
      using From = scalar_t;
      AT_DISPATCH_ALL_TYPES_AND3(at::kHalf, at::kBFloat16, at::kBool, dtype, "convert", [&] {
        for (int64_t i = 0; i < n; ++i) {
          static_cast<scalar_t*>(out)[i] = c10::convert<scalar_t>(static_cast<const From*>(in[0])[i]);
        }
      });
    });
  };
  return node(dtype, value->sizes, {value}, compute);
}

Node constant(const at::Scalar& value, at::ScalarType dtype) {
  return node(dtype, {}, {}, [=](c10::ArrayRef<const void*>, void* out) {
    AT_DISPATCH_ALL_TYPES_AND3(at::kHalf, at::kBFloat16, at::kBool, dtype, "constant", [&] {
      *static_cast<scalar_t*>(out) = value.to<scalar_t>();
    });
  });
}

Node constant(at::IntArrayRef values) {
  auto compute = [v = values.vec()](c10::ArrayRef<const void*>, void* out) {
    std::copy(v.begin(), v.end(), static_cast<int64_t*>(out));
  };
  return node(at::kLong, {static_cast<int64_t>(values.size())}, {}, compute);
}

int64_t count(const Sizes& sizes) { return c10::multiply_integers(sizes); }

Sizes broadcast(const std::vector<Node>& of) {
  Sizes sizes;
  for (const auto& o : of) sizes = at::infer_size(sizes, o->sizes);
  return sizes;
}

Node expand(const Node& value, const Sizes& sizes) {
  if (value->sizes == sizes) return value;
  auto expanded = at::inferExpandGeometry(value->sizes, dense(value->sizes), sizes);
  return viewed(value, sizes, std::get<1>(expanded));
}

Node permute(const Node& value, const Sizes& order) {
  if (std::is_sorted(order.begin(), order.end())) return value;
  auto strides = dense(value->sizes);
  Sizes sizes, permuted;
  for (auto d : order) {
    sizes.push_back(value->sizes[d]);
    permuted.push_back(strides[d]);
  }
  return viewed(value, sizes, permuted);
}

Moved behind(const Node& value, const Sizes& axes) {
  auto rank = static_cast<int64_t>(value->sizes.size());
  if (rank == 0) return {value, {}, 1, 1};
  Sizes order;
  for (int64_t d = 0; d < rank; ++d) {
    if (std::find(axes.begin(), axes.end(), d) == axes.end()) order.push_back(d);
  }
  int64_t rows = 1, columns = 1;
  for (auto d : order) rows *= value->sizes[d];
  for (auto d : axes) {
    order.push_back(d);
    columns *= value->sizes[d];
  }
  Sizes back(rank);
  for (int64_t i = 0; i < rank; ++i) back[order[i]] = i;
  return {permute(value, order), back, rows, columns};
}

std::shared_ptr<Executable> compile(const Signature& signature, c10::function_ref<void(Graph&)> emit) {
  Graph graph(signature);
  emit(graph);
  return std::make_shared<Compiled>(std::move(graph));
}

}  // namespace shiplap::backend
