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

// Between a dense matrix and its blocks.
void copy_blocks(void* matrix, void* blocks, int64_t rows, int64_t columns, int64_t block, at::ScalarType dtype,
                 bool into_blocks) {
  for (int64_t first = 0; first < columns; first += block) {
    const Sizes part{rows, std::min(block, columns - first)}, wide{columns, 1}, narrow{block, 1};
    const auto item = static_cast<int64_t>(c10::elementSize(dtype));
    auto* in_matrix = static_cast<char*>(matrix) + first * item;
    auto* in_blocks = static_cast<char*>(blocks) + first * rows * item;
    if (into_blocks) {
      copy(in_matrix, wide, in_blocks, narrow, part, dtype);
    } else {
      copy(in_blocks, narrow, in_matrix, wide, part, dtype);
    }
  }
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
    if (port.row_major() || port.block > 0) {
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
    for (size_t i = 0; i < inputs.size(); ++i) run.input(graph_.sources[i], signature.inputs[i], inputs[i]);
    // An output may lie where an input does: all values are there before the first output is written.
    for (const auto& result : graph_.results) run.of(result);
    for (size_t i = 0; i < outputs.size(); ++i) {
      const auto& port = signature.outputs[i];
      auto sizes = port.block > 0 ? sizes_in_blocks(sizes_of(port), port.block) : sizes_of(port);
      copy(run.of(graph_.results[i]), dense(sizes), outputs[i], port.block > 0 ? dense(sizes) : port.strides(), sizes,
           port.dtype);
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
  for (const auto& p : s.inputs) {
    auto sizes = sizes_of(p);
    sources.push_back(node(p.dtype, p.block > 0 ? sizes_in_blocks(sizes, p.block) : sizes, {}, nullptr));
    inputs.push_back(p.block > 0 ? from_blocks(sources.back(), sizes) : sources.back());
  }
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
  auto block = signature.outputs[i].block;
  results[i] = block > 0 ? to_blocks(reshape(converted, sizes), block) : converted;
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

Node reshape(const Node& value, const Sizes& sizes) {
  TORCH_INTERNAL_ASSERT(count(sizes) == count(value->sizes));
  return value->sizes == sizes ? value : viewed(value, sizes, dense(sizes));
}

Sizes sizes_in_blocks(const Sizes& sizes, int64_t block) {
  auto last = sizes.empty() ? 1 : sizes.back();
  Sizes made{(last + block - 1) / block};
  if (!sizes.empty()) made.insert(made.end(), sizes.begin(), sizes.end() - 1);
  made.push_back(block);
  return made;
}

Node to_blocks(const Node& value, int64_t block) {
  if (value->block == block) return value->blocks;
  auto columns = value->sizes.empty() ? 1 : value->sizes.back();
  auto compute = [=, rows = columns ? count(value->sizes) / columns : 0, dtype = value->dtype](
                     c10::ArrayRef<const void*> in, void* out) {
    copy_blocks(const_cast<void*>(in[0]), out, rows, columns, block, dtype, true);
  };
  return node(value->dtype, sizes_in_blocks(value->sizes, block), {value}, compute);
}

Node from_blocks(const Node& blocks, const Sizes& sizes) {
  auto block = blocks->sizes.back(), columns = sizes.empty() ? 1 : sizes.back();
  auto rows = columns ? count(sizes) / columns : 0;
  Node clean = blocks;
  if (blocks->compute != nullptr && columns % block != 0) {  // what a function wrote behind the last column
    auto clear = [=, inner = blocks->compute, item = static_cast<int64_t>(c10::elementSize(blocks->dtype))](
                     c10::ArrayRef<const void*> in, void* out) {
      inner(in, out);
      auto* last = static_cast<char*>(out) + columns / block * rows * block * item;
      for (int64_t r = 0; r < rows; ++r) {
        std::memset(last + (r * block + columns % block) * item, 0, (block - columns % block) * item);
      }
    };
    clean = node(blocks->dtype, blocks->sizes, blocks->operands, clear);
  }
  auto compute = [=, dtype = blocks->dtype](c10::ArrayRef<const void*> in, void* out) {
    copy_blocks(out, const_cast<void*>(in[0]), rows, columns, block, dtype, false);
  };
  Value made{blocks->dtype, sizes, {clean}, compute, clean, block};
  return std::make_shared<const Value>(std::move(made));
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
