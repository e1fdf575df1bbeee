#include <c10/util/Exception.h>
#include <vendor.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <openvino/core/model.hpp>
#include <openvino/op/broadcast.hpp>
#include <openvino/op/constant.hpp>
#include <openvino/op/convert.hpp>
#include <openvino/op/matmul.hpp>
#include <openvino/op/not_equal.hpp>
#include <openvino/op/pad.hpp>
#include <openvino/op/reshape.hpp>
#include <openvino/op/slice.hpp>
#include <openvino/op/transpose.hpp>
#include <openvino/runtime/core.hpp>
#include <openvino/runtime/intel_cpu/properties.hpp>

namespace shiplap::backend {
namespace {

using ov::op::v0::Constant, ov::op::v0::Convert, ov::op::v0::MatMul, ov::op::v1::NotEqual, ov::op::v1::Reshape,
    ov::op::v1::Transpose, ov::op::v3::Broadcast, ov::op::v8::Slice, ov::op::v12::Pad;

constexpr struct {
  at::ScalarType torch;
  ov::element::Type_t vendor;
} kTypes[] = {
    {at::kFloat, ov::element::f32},    {at::kDouble, ov::element::f64},
    {at::kHalf, ov::element::f16},     {at::kBFloat16, ov::element::bf16},
    {at::kBool, ov::element::boolean}, {at::kByte, ov::element::u8},
    {at::kChar, ov::element::i8},      {at::kShort, ov::element::i16},
    {at::kInt, ov::element::i32},      {at::kLong, ov::element::i64},
};

ov::Shape shape(at::IntArrayRef sizes) { return {sizes.begin(), sizes.end()}; }

// The stored sizes of a blocked tensor, and its dims in the order [outer..., blocks, block].
ov::Shape blocked_shape(const Port& p) {
  auto last = p.sizes.back();
  ov::Shape s{static_cast<size_t>((last + p.block - 1) / p.block)};
  s.insert(s.end(), p.sizes.begin(), p.sizes.end() - 1);
  s.push_back(static_cast<size_t>(p.block));
  return s;
}

ov::Shape stored_shape(const Port& p) { return p.block > 0 ? blocked_shape(p) : shape(p.stored); }

Node transposed(const Node& value, at::IntArrayRef order) {
  return std::is_sorted(order.begin(), order.end()) ? value
                                                    : make<Transpose>(value, constant(order));
}

Node from_blocks(Node value, const Port& p) {
  auto rank = static_cast<int64_t>(p.sizes.size());
  std::vector<int64_t> order;  // [blocks, outer..., block] -> [outer..., blocks, block]
  for (int64_t d = 1; d < rank; ++d) {
    order.push_back(d);
  }
  order.insert(order.end(), {0, rank});
  auto padded = p.sizes;
  padded.back() = -1;
  value = make<Reshape>(transposed(value, order), constant(padded), false);
  return make<Slice>(value, constant({0}), constant({p.sizes.back()}), constant({1}),
                     constant({rank - 1}));
}

Node to_blocks(Node value, const Port& p) {
  auto rank = static_cast<int64_t>(p.sizes.size());
  auto blocks = static_cast<int64_t>(blocked_shape(p)[0]);
  std::vector<int64_t> none(p.sizes.size(), 0), pad = none;
  pad.back() = blocks * p.block - p.sizes.back();
  auto filler = convert(constant(at::Scalar(0), at::kFloat), p.dtype);
  value = make<Pad>(value, constant(none), constant(pad), filler, ov::op::PadMode::CONSTANT);
  std::vector<int64_t> split(p.sizes.begin(), p.sizes.end() - 1);
  split.insert(split.end(), {blocks, p.block});
  std::vector<int64_t> order{rank - 1};
  for (int64_t d = 0; d < rank - 1; ++d) {
    order.push_back(d);
  }
  order.push_back(rank);
  return transposed(make<Reshape>(value, constant(split), false), order);
}

Node as_tensor(Node value, const Port& p) {
  if (p.block > 0) {
    return from_blocks(value, p);
  }
  std::vector<int64_t> inverse(p.order.size());
  for (size_t i = 0; i < p.order.size(); ++i) {
    inverse[p.order[i]] = static_cast<int64_t>(i);
  }
  value = transposed(value, inverse);
  return sizes(value) == std::vector<int64_t>(p.sizes.begin(), p.sizes.end())
             ? value
             : make<Broadcast>(value, constant(p.sizes));
}

bool same_but_ones(at::IntArrayRef a, at::IntArrayRef b) {
  auto without = [](at::IntArrayRef sizes) {
    std::vector<int64_t> kept;
    std::copy_if(sizes.begin(), sizes.end(), std::back_inserter(kept),
                 [](int64_t n) { return n != 1; });
    return kept;
  };
  return without(a) == without(b);
}

}  // namespace

Graph::Graph(const Signature& signature)
    : signature_(signature), results_(signature.outputs.size()) {
  for (const auto& p : signature.inputs) {
    parameters_.push_back(
        std::make_shared<ov::op::v0::Parameter>(vendor_type(p.dtype), stored_shape(p)));
    inputs_.push_back(as_tensor(parameters_.back()->output(0), p));
  }
}

Node Graph::input(size_t i) {
  TORCH_INTERNAL_ASSERT(i < inputs_.size(), signature_.op, ": input ", i, " of ", inputs_.size());
  return inputs_[i];
}

Node Graph::input(size_t i, at::ScalarType as) { return convert(input(i), as); }

void Graph::output(size_t i, Node value) {
  TORCH_INTERNAL_ASSERT(i < results_.size(), signature_.op, ": output ", i, " of ",
                        results_.size());
  const auto& p = signature_.outputs[i];
  auto got = sizes(value);
  TORCH_INTERNAL_ASSERT(same_but_ones(got, p.sizes), signature_.op, ": the graph computes sizes ",
                        at::IntArrayRef(got), " for output ", i, ", torch expects ",
                        at::IntArrayRef(p.sizes));
  value = convert(value, p.dtype);
  if (ov::is_type<ov::op::v0::Parameter>(value.get_node())) {
    // The CPU plugin takes an output that is an input for written: it leaves our memory as it is.
    value = make<Convert>(value, vendor_type(p.dtype));
  }
  if (at::IntArrayRef(got) != at::IntArrayRef(p.sizes)) {
    value = make<Reshape>(value, constant(p.sizes), false);
  }
  value = p.block > 0 ? to_blocks(value, p) : transposed(value, p.order);
  results_[i] = std::make_shared<ov::op::v0::Result>(value);
}

const ov::ResultVector& Graph::results() const {
  for (size_t i = 0; i < results_.size(); ++i) {
    TORCH_INTERNAL_ASSERT(results_[i], signature_.op, ": the graph gives no output ", i);
  }
  return results_;
}

ov::element::Type vendor_type(at::ScalarType t) {
  for (const auto& pair : kTypes) {
    if (pair.torch == t) {
      return pair.vendor;
    }
  }
  TORCH_CHECK_NOT_IMPLEMENTED(false, "OpenVINO has no element type for ", t,
                              ": the metadata of this op must exclude it");
}

Node convert(Node value, at::ScalarType to) {
  auto type = vendor_type(to);
  auto from = value.get_element_type();
  if (from == type) {
    return value;
  }
  if (to == at::kBool) {
    return make<NotEqual>(value, Constant::create(from, ov::Shape{}, {0})->output(0));
  }
  return make<Convert>(value, type);
}

Node constant(const at::Scalar& value, at::ScalarType dtype) {
  auto type = vendor_type(dtype);
  if (at::isFloatingType(dtype)) {
    // As float: OpenVINO takes an infinite double for one that does not fit.
    auto made = dtype == at::kDouble
                    ? Constant::create(type, ov::Shape{}, {value.toDouble()})
                    : Constant::create(type, ov::Shape{}, {static_cast<float>(value.toDouble())});
    return made->output(0);
  }
  auto integer = dtype == at::kBool ? static_cast<int64_t>(value.to<bool>()) : value.to<int64_t>();
  return Constant::create(type, ov::Shape{}, {integer})->output(0);
}

Node constant(at::IntArrayRef values) {
  return Constant::create(ov::element::i64, ov::Shape{values.size()}, values.vec())->output(0);
}

at::ScalarType dtype(const Node& node) {
  for (const auto& pair : kTypes) {
    if (pair.vendor == node.get_element_type()) {
      return pair.torch;
    }
  }
  TORCH_INTERNAL_ASSERT(false, "torch has no dtype for ", node.get_element_type().get_type_name());
}

std::vector<int64_t> sizes(const Node& node) {
  const auto& s = node.get_shape();
  return {s.begin(), s.end()};
}

// --- execution

namespace {

// The plugin's oneDNN keeps primitives of up to 1024 shapes for the whole process. No end of a graph frees
// them, and nothing counts them: a thousand lengths took 200 MB. A compiled graph has its primitives
// itself, so they are not kept. oneDNN reads the capacity from the environment when it makes its first
// primitive, and that of torch, which needs its own, reads the same variable: it is set for one graph.
void keep_no_primitives(ov::Core& core) {
  static constexpr auto kCapacity = "ONEDNN_PRIMITIVE_CACHE_CAPACITY";
  if (getenv(kCapacity) != nullptr) {
    return;
  }
  setenv(kCapacity, "0", 1);
  auto x = std::make_shared<ov::op::v0::Parameter>(ov::element::f32, ov::Shape{2, 2});
  core.compile_model(std::make_shared<ov::Model>(ov::OutputVector{make<MatMul>(x, x, false, false)},
                                                 ov::ParameterVector{x}),
                     "CPU", ov::num_streams(0), ov::inference_num_threads(1));
  unsetenv(kCapacity);
}

ov::Core& core() {
  static auto* c = [] {
    auto* made = new ov::Core;  // never destroyed: threads with requests may outlive static destruction
    keep_no_primitives(*made);
    return made;
  }();
  return *c;
}

// An infer request serves one thread at a time, so a compiled model keeps as many as were ever in
// use at once.
class Compiled final : public Executable {
 public:
  Compiled(const Signature& signature, ov::CompiledModel model)
      : op_(signature.op), model_(std::move(model)) {
    auto add = [](const Port& p, std::vector<Bound>& to) {
      to.push_back({vendor_type(p.dtype), stored_shape(p), nullptr});
    };
    for (const auto& p : signature.inputs) {
      add(p, inputs_);
    }
    for (const auto& p : signature.outputs) {
      add(p, outputs_);
    }
  }

  void run(c10::ArrayRef<const void*> inputs, c10::ArrayRef<void*> outputs) override {
    auto slot = take();
    try {
      for (size_t i = 0; i < inputs.size(); ++i) {
        auto& b = slot->inputs[i];
        if (b.data != inputs[i]) {
          slot->request.set_input_tensor(i,
                                         ov::Tensor(b.type, b.shape, const_cast<void*>(inputs[i])));
          b.data = inputs[i];
        }
      }
      for (size_t i = 0; i < outputs.size(); ++i) {
        auto& b = slot->outputs[i];
        if (b.data != outputs[i]) {
          slot->request.set_output_tensor(i, ov::Tensor(b.type, b.shape, outputs[i]));
          b.data = outputs[i];
        }
      }
      slot->request.infer();
    } catch (const ov::Exception& e) {
      TORCH_CHECK(false, op_, ": OpenVINO failed to run the graph: ", e.what());
    }
    std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(std::move(slot));
  }

 private:
  struct Bound {
    ov::element::Type type;
    ov::Shape shape;
    const void* data;  // that the request reads or writes now
  };
  struct Slot {
    ov::InferRequest request;
    std::vector<Bound> inputs, outputs;
  };

  std::unique_ptr<Slot> take() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!idle_.empty()) {
        auto slot = std::move(idle_.back());
        idle_.pop_back();
        return slot;
      }
    }
    return std::make_unique<Slot>(Slot{model_.create_infer_request(), inputs_, outputs_});
  }

  const char* op_;
  ov::CompiledModel model_;
  std::vector<Bound> inputs_, outputs_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Slot>> idle_;
};

}  // namespace

std::shared_ptr<Executable> compile(const Signature& signature,
                                    c10::function_ref<void(Graph&)> emit) {
  try {
    Graph graph(signature);
    emit(graph);
    auto model = std::make_shared<ov::Model>(graph.results(), graph.parameters(), signature.op);
    // Accuracy over the plugin's defaults: on hosts with bf16 or f16 units it would compute float32
    // graphs in those. No streams: a graph runs in the thread that calls it, where one stream would
    // be one thread for each graph.
    auto compiled = core().compile_model(
        model, "CPU", ov::hint::inference_precision(ov::element::f32),
        ov::hint::execution_mode(ov::hint::ExecutionMode::ACCURACY), ov::num_streams(0),
        ov::inference_num_threads(signature.threads), ov::hint::enable_cpu_pinning(false));
    return std::make_shared<Compiled>(signature, std::move(compiled));
  } catch (const ov::Exception& e) {
    TORCH_CHECK(false, signature.op, ": OpenVINO refuses the graph: ", e.what());
  }
}

}  // namespace shiplap::backend
