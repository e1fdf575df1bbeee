// The recording of autograd for ops whose gradient is declared as ops: the Autograd kernel, and the node of the graph. It
// is compiled against torch's own headers, once for each torch, and reads what an op saves and calls from a `Formula`.
// What it does not serve (levels of torch.func, tangents, modes, subclasses, gradients of gradients) it gives to Python.
#pragma once

#include <ATen/FuncTorchTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace shiplap::autograd {

using at::IValue;
using at::Tensor;
using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using Stack = torch::jit::Stack;
using NodePointer = decltype(Edge::function);  // a std::shared_ptr in torch 2.11, an intrusive one in 2.13
template <class T, size_t N>
using Small = c10::SmallVector<T, N>;

// ------------------------------------------------------------------------------------------------ what an op declares

enum class Argument : int64_t { kValue, kTensor, kDetached };  // through a detached tensor no gradient flows
enum class Source : int64_t { kArgument, kResult };
enum class Taken : int64_t { kGradient, kSaved, kValue };

using Place = std::pair<Source, size_t>;  // of an argument or a result of the call

// An op of the gradient: where each of its arguments comes from, and which arguments its results are gradients of.
struct Part {
  c10::OperatorHandle op;
  std::vector<std::pair<Taken, size_t>> takes;  // the number among gradients of results, saved tensors or values
  std::vector<size_t> gives;                    // numbers among the tensors
};

struct Formula {
  std::string name;
  c10::OperatorHandle python;  // the gradient in Python: of all arguments and saved results, gradients, needs and shapes
  std::vector<Argument> arguments;
  std::vector<size_t> tensors, values;  // their places among the arguments
  std::vector<bool> results;            // whether a gradient flows through each
  std::vector<Place> saves;
  std::vector<Part> parts;
};

// What a node keeps of a call, unpacked.
struct Values {
  Small<Tensor, 6> gradients, saved;
  Small<IValue, 4> values;
  Small<bool, 8> needs;  // of each tensor
};

// Calls the ops of which a result is needed. An absent gradient of a result counts as zeros, which `zeros` makes.
template <class Zeros>
variable_list call_parts(const Formula& of, Values& values, const Zeros& zeros) {
  // A backward inside of an autocast region gives the gradients that it gives after the region.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  variable_list found(of.tensors.size());
  Stack stack;
  for (const Part& part : of.parts) {
    if (std::none_of(part.gives.begin(), part.gives.end(), [&](size_t at) { return values.needs[at]; })) continue;
    stack.clear();
    stack.reserve(part.takes.size());
    for (const auto& [from, at] : part.takes) {
      if (from == Taken::kValue) {
        stack.push_back(values.values[at]);
        continue;
      }
      Tensor& tensor = from == Taken::kSaved ? values.saved[at] : values.gradients[at];
      if (from == Taken::kGradient && !tensor.defined()) tensor = zeros(at);
      tensor.defined() ? stack.emplace_back(tensor) : stack.emplace_back();
    }
    part.op.callBoxed(stack);
    for (size_t i = 0; i < part.gives.size(); ++i) {
      if (values.needs[part.gives[i]]) found[part.gives[i]] = std::move(stack[i]).toTensor();
    }
  }
  return found;
}

// ----------------------------------------------------------------------------------------------------------- the node

class Recorded final : public Node {
 public:
  explicit Recorded(const Formula* of) : of_(*of) {}

  std::string name() const override { return of_.name; }
  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable& each : saved_) each.reset_data();
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override;
  variable_list apply_with_saved(const variable_list& gradients, torch::dynamo::autograd::SwapSavedVariables& swap) override;

  // Before the call, whose arguments are these.
  void keep_arguments(const IValue* arguments) {
    torch::autograd::edge_list edges;
    edges.reserve(of_.tensors.size());
    for (const size_t at : of_.tensors) {
      const Tensor* tensor = arguments[at].isTensor() ? &arguments[at].toTensor() : nullptr;
      const bool present = tensor != nullptr && tensor->defined();
      const bool asked = present && of_.arguments[at] == Argument::kTensor && tensor->requires_grad();
      edges.push_back(asked ? torch::autograd::impl::gradient_edge(*tensor) : Edge());
      shapes_.push_back(present ? tensor->dim() : -1);
      if (present) shapes_.append(tensor->sizes().begin(), tensor->sizes().end());
    }
    set_next_edges(std::move(edges));
    for (const size_t at : of_.values) values_.push_back(arguments[at]);
    saved_.resize(of_.saves.size());
    for (size_t i = 0; i < of_.saves.size(); ++i) {
      const auto [source, at] = of_.saves[i];
      if (source != Source::kArgument || !arguments[at].isTensor()) continue;
      const Tensor& tensor = arguments[at].toTensor();
      saved_[i] = SavedVariable(of_.arguments[at] == Argument::kDetached ? tensor.detach() : tensor, false);
    }
  }
  // After it.
  void keep_results(const NodePointer& self, const IValue* results) {
    for (size_t i = 0; i < of_.results.size(); ++i) {
      const Tensor& tensor = results[i].toTensor();
      const uint32_t number = add_input_metadata(tensor);
      if (of_.results[i] && torch::autograd::isDifferentiableType(tensor.scalar_type())) {
        torch::autograd::impl::set_gradient_edge(tensor, {self, number});
      }
    }
    for (size_t i = 0; i < of_.saves.size(); ++i) {
      const auto [source, at] = of_.saves[i];
      if (source == Source::kResult) saved_[i] = SavedVariable(results[at].toTensor(), true);
    }
  }

 private:
  variable_list apply(variable_list&& gradients) override {
    Values values = unpacked(gradients);
    // A gradient of a gradient is Python's, and so are the errors of calls that fail and of gradients that do not fit.
    if (!at::GradMode::is_enabled()) {
      try {
        variable_list found = call_parts(of_, values, [this](size_t at) { return input_metadata(at).zeros_like(); });
        if (fits(values, found)) return found;
      } catch (const c10::Error&) {
      } catch (const std::runtime_error&) {  // of native code; an exception of Python passes
      }
    }
    return call_python(values);
  }

  Values unpacked(const variable_list& gradients) {
    Values values;
    values.gradients.append(gradients.begin(), gradients.end());
    const std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < saved_.size(); ++i) {
      values.saved.push_back(saved_[i].unpack(of_.saves[i].first == Source::kResult ? getptr() : nullptr));
    }
    values.values.append(values_.begin(), values_.end());
    for (size_t i = 0; i < of_.tensors.size(); ++i) values.needs.push_back(task_should_compute_output(i));
    return values;
  }

  bool fits(const Values& values, const variable_list& found) const {
    const int64_t* shape = shapes_.data();
    for (size_t i = 0; i < found.size(); ++i) {
      const int64_t rank = *shape++;
      const auto sizes = at::IntArrayRef(shape, rank < 0 ? 0 : static_cast<size_t>(rank));
      if (values.needs[i] && (!found[i].defined() || found[i].sizes() != sizes)) return false;
      shape += sizes.size();
    }
    return true;
  }

  variable_list call_python(Values& values) {
    Stack stack;
    std::vector<std::optional<Tensor>> arguments(of_.arguments.size()), results(of_.results.size());
    for (size_t i = 0; i < values.saved.size(); ++i) {
      const auto [source, at] = of_.saves[i];
      if (values.saved[i].defined()) (source == Source::kArgument ? arguments : results)[at] = values.saved[i];
    }
    size_t next = 0;
    for (size_t at = 0; at < arguments.size(); ++at) {
      stack.push_back(of_.arguments[at] == Argument::kValue ? values.values[next++] : IValue(arguments[at]));
    }
    c10::List<Tensor> gradients;
    for (size_t at = 0; at < of_.results.size(); ++at) {
      gradients.push_back(values.gradients[at].defined() ? values.gradients[at] : input_metadata(at).zeros_like());
    }
    c10::List<bool> needs;
    for (const bool need : values.needs) needs.push_back(need);
    stack.emplace_back(c10::List<std::optional<Tensor>>(results));
    stack.emplace_back(std::move(gradients));
    stack.emplace_back(std::move(needs));
    stack.emplace_back(c10::List<int64_t>(at::IntArrayRef(shapes_.data(), shapes_.size())));
    of_.python.callBoxed(stack);
    variable_list found;
    for (IValue& each : stack) found.push_back(each.isTensor() ? std::move(each).toTensor() : Tensor());
    return found;
  }

  const Formula& of_;
  Small<SavedVariable, 4> saved_;
  Small<IValue, 2> values_;
  Small<int64_t, 12> shapes_;  // of each tensor the number of its dims, -1 where it is absent, and its sizes
};

template <class T = Recorded>
NodePointer make_node(const Formula* of) {
  if constexpr (requires(T* node) { deleteNode(node); }) {
    return NodePointer(static_cast<Node*>(new T(of)), [](Node* node) { deleteNode(static_cast<T*>(node)); });
  } else {
    return c10::make_intrusive<T>(of);
  }
}

// -------------------------------------------------------------------------------------------------- compiled autograd

inline void Recorded::compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const {
  args.collect(reinterpret_cast<uint64_t>(&of_));
  for (size_t i = 0; i < saved_.size(); ++i) args.collect(saved_[i], of_.saves[i].first == Source::kResult);
  for (const IValue& each : values_) args.collect(each);
  for (size_t i = 0; i < of_.results.size(); ++i) args.collect(input_metadata(i));
}

inline variable_list Recorded::apply_with_saved(const variable_list& gradients,
                                                torch::dynamo::autograd::SwapSavedVariables& swap) {
  using torch::dynamo::autograd::IValuePacker;
  using Metadata = torch::autograd::InputMetadata;
  for (SavedVariable& each : saved_) swap.before(each);
  for (IValue& each : values_) swap.before(each);
  for (size_t i = 0; i < of_.results.size(); ++i) swap.before(mutable_input_metadata(i));
  Values values = unpacked(gradients);
  // The graph brings the gradients, then the sizes of the results, the saved tensors that are there, and the numbers.
  std::vector<IValue> packed;
  for (size_t i = 0; i < of_.results.size(); ++i) packed.push_back(IValuePacker<Metadata>::pack(input_metadata(i)));
  std::vector<bool> present, lifted;
  for (const Tensor& each : values.saved) {
    present.push_back(each.defined());
    if (each.defined()) packed.emplace_back(each);
  }
  for (const IValue& each : values.values) {
    lifted.push_back(each.isInt() || each.isSymInt() || each.isDouble() || each.isSymFloat());
    if (lifted.back()) packed.push_back(each);
  }
  std::vector<at::TypePtr> schema;
  for (const IValue& each : packed) schema.push_back(each.isTensor() ? at::TensorType::get() : each.type());
  const auto function = [of = &of_, present, lifted, needs = values.needs, constant = values.values](
                            const variable_list& given, const std::vector<IValue>& args) {
    Values brought;
    brought.gradients.append(given.begin(), given.end());
    brought.needs = needs, brought.values = constant;
    size_t next = of->results.size();
    for (const bool there : present) brought.saved.push_back(there ? args[next++].toTensor() : Tensor());
    for (size_t i = 0; i < lifted.size(); ++i) {
      if (lifted[i]) brought.values[i] = args[next++];
    }
    return call_parts(*of, brought, [&](size_t at) { return IValuePacker<Metadata>::unpack(args[at]).zeros_like(); });
  };
  const auto outputs = IValuePacker<std::vector<std::optional<Metadata>>>::pack(
      torch::dynamo::autograd::get_input_metadata(next_edges()));
  const auto& compiler = torch::dynamo::autograd::getPyCompilerInterface();
  const std::string bound = compiler->bind_function(swap.get_py_compiler(), of_.name, function, schema, true, true);
  variable_list found = compiler->call_function(swap.get_py_compiler(), "apply_functional", bound, gradients, packed, outputs);
  for (SavedVariable& each : saved_) swap.after(each);
  for (IValue& each : values_) swap.after(each);
  for (size_t i = 0; i < of_.results.size(); ++i) swap.after(mutable_input_metadata(i));
  return found;
}

// --------------------------------------------------------------------------------------------------------- the kernel

// Whether a level of torch.func is open in this thread.
inline bool is_transformed() {
  const auto& levels = at::functorch::functorchTLSAccessor();
  if (!levels) return false;
  try {
    levels->checkSupportsCppAutogradFunction();
  } catch (const std::exception&) {
    return true;
  }
  return false;
}

using Route = std::atomic<const Formula*>;  // null where Python records

// The kernel of an op under the Autograd key of a device type.
class RecordCall final : public c10::OperatorKernel {
 public:
  RecordCall(const Route* route, c10::OperatorHandle python, c10::DispatchKey key, c10::DispatchKey autograd)
      : route_(route), python_(python) {
    const c10::DispatchKeySet plain({key, autograd, c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::BackendSelect});
    others_ = ~plain.raw_repr();
  }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) const {
    const Formula* of = route_->load(std::memory_order_acquire);
    // Bits of other keys are of modes, subclasses, traces, other devices and views that are resolved later.
    if (of == nullptr || (keys.raw_repr() & others_) != 0 || is_transformed()) {
      return python_.redispatchBoxed(keys, stack);
    }
    const IValue* arguments = stack->data() + stack->size() - of->arguments.size();
    bool asked = false;
    for (const size_t at : of->tensors) {
      if (!arguments[at].isTensor()) continue;
      const Tensor& tensor = arguments[at].toTensor();
      if (torch::autograd::isFwGradDefined(tensor)) return python_.redispatchBoxed(keys, stack);
      asked = asked || (of->arguments[at] == Argument::kTensor && tensor.defined() && tensor.requires_grad());
    }
    NodePointer node;
    if (asked && at::GradMode::is_enabled()) {
      node = make_node(of);
      static_cast<Recorded*>(node.get())->keep_arguments(arguments);
    }
    {
      const at::AutoGradMode off(false);  // as in the forward of an autograd.Function; a kernel in Python may turn it on
      op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
    }
    if (node) {
      const IValue* results = stack->data() + stack->size() - of->results.size();
      static_cast<Recorded*>(node.get())->keep_results(node, results);
    }
  }

 private:
  const Route* route_;
  c10::OperatorHandle python_;
  uint64_t others_ = 0;
};

// --------------------------------------------------------------------------------------------------------- attachment

inline c10::OperatorHandle find_op(const std::string& name) {
  const size_t dot = name.find('.');
  return c10::Dispatcher::singleton().findSchemaOrThrow(name.substr(0, dot).c_str(),
                                                        dot == std::string::npos ? "" : name.c_str() + dot + 1);
}

// Reads a formula from numbers and names, as `kernels/native/gradient_recorder.py` writes them.
class Reader {
 public:
  Reader(const int64_t* words, const char* const* names) : words_(words), names_(names) {}
  size_t number() { return static_cast<size_t>(*words_++); }
  std::string name() { return *names_++; }
  template <class Kind>
  std::vector<std::pair<Kind, size_t>> places() {
    std::vector<std::pair<Kind, size_t>> read(number());
    for (auto& [kind, at] : read) kind = static_cast<Kind>(number()), at = number();
    return read;
  }

 private:
  const int64_t* words_;
  const char* const* names_;
};

inline const Formula* read_formula(Reader read) {
  std::string name = read.name();
  auto made = std::make_unique<Formula>(Formula{std::move(name), find_op(read.name())});
  made->arguments.resize(read.number());
  for (size_t i = 0; i < made->arguments.size(); ++i) {
    made->arguments[i] = static_cast<Argument>(read.number());
    (made->arguments[i] == Argument::kValue ? made->values : made->tensors).push_back(i);
  }
  made->results.resize(read.number());
  for (size_t i = 0; i < made->results.size(); ++i) made->results[i] = read.number() != 0;
  made->saves = read.places<Source>();
  for (size_t count = read.number(); count > 0; --count) {
    Part part{find_op(read.name()), read.places<Taken>()};
    part.gives.resize(read.number());
    for (size_t& at : part.gives) at = read.number();
    made->parts.push_back(std::move(part));
  }
  return made.release();  // nodes refer to it for as long as they live
}

// The route of an op, whose kernels are registered the first time. They stay: torch frees what it removes while other
// threads may be calling it. `python` is the op that records in Python.
inline Route* route_of(const std::string& name, const std::string& python) {
  struct Registered {
    Route route{nullptr};
    std::vector<torch::Library> libraries;
  };
  static auto& known = *new std::map<std::string, Registered>();
  if (const auto found = known.find(name); found != known.end()) return &found->second.route;
  Registered& made = known[name];
  const size_t colon = name.find("::");
  using Key = c10::DispatchKey;
  for (const auto& [key, autograd] : {std::pair(Key::CPU, Key::AutogradCPU), std::pair(Key::CUDA, Key::AutogradCUDA)}) {
    torch::Library& library = made.libraries.emplace_back(torch::Library::IMPL, name.substr(0, colon), autograd, "shiplap", 0);
    library.impl(name.substr(colon + 2).c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<RecordCall>(
                                                     &made.route, find_op(python), key, autograd)));
  }
  return &made.route;
}

// What `call` returns, or null where it throws, with the reason.
template <class Call>
auto guarded(std::string& problem, const Call& call) -> decltype(call()) {
  try {
    return call();
  } catch (const std::exception& e) {
    problem = e.what();
    return nullptr;
  }
}

}  // namespace shiplap::autograd
