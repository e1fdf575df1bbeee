#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <device_checks.h>
#include <shiplap_backend/cells.h>
#include <shiplap_backend/device.h>
#include <shiplap_backend/fallback.h>
#include <shiplap_backend/mirror.h>
#include <shiplap_backend/memory.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace shiplap::backend {
namespace {

using c10::IValue;
using torch::jit::Stack;

thread_local struct {
  Why why = Why::unregistered;
  const char* detail = "";
} announced;

const char* text(Why why) {
  switch (why) {
    case Why::dtype:
      return "dtype";
    case Why::value:
      return "value";
    case Why::layout:
      return "layout";
    case Why::empty:
      return "empty";
    default:
      return "unregistered";
  }
}

// --- policy and counters

struct Ledger {
  std::mutex mutex;
  std::vector<OpInfo*> native;
  std::unordered_map<c10::OperatorName, std::map<std::string, int64_t>> fallback;
  std::vector<std::string> allowed;
  std::atomic<Policy> policy{Policy::count};
};

Ledger& ledger() {
  static auto* l = new Ledger;
  return *l;
}

bool permitted(const c10::OperatorName& op, const std::string& name) {
  std::lock_guard<std::mutex> lock(ledger().mutex);
  const auto& allowed = ledger().allowed;
  return std::any_of(allowed.begin(), allowed.end(),
                     [&](const auto& a) { return a == name || a == op.name; });
}

// Counts the fallback and applies the policy, which is the process's and not the thread's: a
// backward runs in a thread of the autograd engine's own.
void enter(const c10::OperatorName& op, Why why, const char* detail) {
  std::string reason = text(why);
  if (*detail != '\0') {
    reason.append(": ").append(detail);
  }
  bool first;
  {
    std::lock_guard<std::mutex> lock(ledger().mutex);
    first = ++ledger().fallback[op][reason] == 1;
  }
  auto policy = ledger().policy.load(std::memory_order_relaxed);
  if (policy == Policy::count || (policy == Policy::warn && !first)) {
    return;
  }
  auto name = c10::toString(op);
  if (policy == Policy::warn) {
    TORCH_WARN(name, " runs on the CPU in the device's place (", reason,
               "); said once for each op and reason");
    return;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(permitted(op, name), name,
                              " would run on the CPU in the device's place\n  got      ", reason,
                              "\n  expected no fallback: the policy is \"error\"\n  fix      give "
                              "the op an entry in ops.yaml, allow it by name, or set "
                              "fallback_policy(\"count\")");
}

// --- arguments

template <class Map>
IValue mapped(const IValue& value, const Map& map) {
  if (value.isTensor()) {
    return map(value.toTensor());
  }
  if (value.isTensorList()) {
    auto list = value.toTensorVector();
    std::transform(list.begin(), list.end(), list.begin(), map);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& t : value.toOptionalTensorList()) {
      list.push_back(t ? std::optional(map(*t)) : std::nullopt);
    }
    return list;
  }
  return value;
}

IValue to_host(const IValue& value, const c10::Argument& declared, Host& host) {
  if (value.isDevice()) {
    return value.toDevice().type() == kDeviceType ? IValue(c10::Device(c10::kCPU)) : value;
  }
  if (value.isGenerator()) {
    return host_generator(value.toGenerator());
  }
  if (value.isNone() &&
      declared.type()->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get()))) {
    return host_generator(std::nullopt);
  }
  const auto* alias = declared.alias_info();
  return mapped(value, [&, written = alias != nullptr && alias->isWrite()](const at::Tensor& t) {
    return host.view(t, written);
  });
}

// Calls `f` with each tensor of an argument.
template <class F>
void each_tensor(const IValue& value, const F& f) {
  mapped(value, [&](const at::Tensor& t) {
    if (t.defined()) {
      f(t);
    }
    return t;
  });
}

// The device of the first tensor there, if there is one.
std::optional<c10::Device> device_of_tensors(at::ArrayRef<IValue> arguments) {
  std::optional<c10::Device> found;
  for (const auto& value : arguments) {
    each_tensor(value, [&](const at::Tensor& t) {
      found = !found && on_device(t) ? std::optional(t.device()) : found;
    });
  }
  return found;
}

// The device that a call names.
std::optional<c10::Device> named_device(at::ArrayRef<IValue> arguments) {
  std::optional<c10::Device> named;
  for (const auto& value : arguments) {
    named = value.isDevice() ? value.toDevice() : named;
  }
  return named;
}

// Overloads for which torch compares no devices before it calls a kernel; the kernels of most of them
// accept a number of the CPU, and indices.
bool compares_devices(const c10::OperatorName& op) {
  static const auto* unchecked = [] {
    auto* names = new std::unordered_set<std::string>;
    for (const auto* name : kUnchecked) {
      names->insert(std::string("aten::") + name);
    }
    return names;
  }();
  return unchecked->count(c10::toString(op)) == 0;
}

// Whether the kernels of an accelerator accept a tensor of another device in this place.
bool may_differ(const c10::OperatorName& op, const c10::Argument& declared, const at::Tensor& t) {
  const auto* alias = declared.alias_info();
  if (!t.is_cpu() || (alias != nullptr && alias->isWrite()) || compares_devices(op)) {
    return false;
  }
  // Sizes of nested tensors are tensors of the CPU everywhere.
  return t.dim() == 0 || op.name.rfind("aten::_nested", 0) == 0 ||
         declared.type()->isSubtypeOf(*c10::ListType::create(c10::OptionalType::ofTensor()));
}

// torch's rule for CUDA, which native wrappers follow too (same_device).
void check_devices(const c10::OperatorHandle& op, at::ArrayRef<IValue> arguments, c10::Device here) {
  const auto& declared = op.schema().arguments();
  for (size_t i = 0; i < declared.size(); ++i) {
    each_tensor(arguments[i], [&](const at::Tensor& t) {
      if (t.device() != here && !may_differ(op.operator_name(), declared[i], t)) {
        devices_differ(op.operator_name().name, declared[i].name(), here, t.device());
      }
    });
  }
}

// --- ops of the CPU by another name

// Convolution asks a PrivateUse1 device for these, whose kernel for all devices raises: the CPU has
// them under other names.
constexpr struct {
  const char *name, *on_cpu;
} kOtherNames[] = {
    {"aten::convolution_overrideable", "aten::convolution"},
    {"aten::convolution_backward_overrideable", "aten::convolution_backward"},
};

// Composites that are less than the CPU's kernel. The first two ask for the device by name, and raise
// for one that they do not know. The norms are made of a batch norm, which scales and shifts a value
// that is far from zero before it takes the mean off, and views an image as if it were contiguous.
constexpr const char* kNeedTheCpu[] = {"aten::mode.values", "aten::conj_physical_",
                                       "aten::native_layer_norm", "aten::native_group_norm"};

const char* other_name(const c10::OperatorName& op) {
  for (const auto& pair : kOtherNames) {
    if (op.name == pair.name && op.overload_name.empty()) {
      return pair.on_cpu;
    }
  }
  return nullptr;
}

c10::OperatorHandle on_cpu(const c10::OperatorHandle& op, Stack& stack, size_t first,
                           c10::DispatchKey key) {
  const auto* name = other_name(op.operator_name());
  if (name == nullptr) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        op.hasComputedKernelForDispatchKey(key),
        c10::toString(op.operator_name()),
        " has no kernel for this device, and the CPU has none to fall back to");
    return op;
  }
  if (stack.size() - first == 10) {  // grad_output, input, weight, [bias_sizes,] ...: the bias is
                                     // as long as grad's channels
    auto channels = stack[first].toTensor().size(1);
    stack.insert(stack.begin() + static_cast<int64_t>(first) + 3,
                 IValue(std::vector<int64_t>{channels}));
  }
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

// Random ops without a Generator argument draw from the CPU's default generator: it holds the
// device's state meanwhile.
class Seeded {
 public:
  explicit Seeded(const c10::OperatorHandle& op) {
    if (!op.hasTag(at::Tag::nondeterministic_seeded)) {
      return;
    }
    for (const auto& a : op.schema().arguments()) {
      if (a.type()->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get()))) {
        return;
      }
    }
    turn_ = std::unique_lock(turns());
    saved_ = state_of(cpu());
    set_state(cpu(), state_of(host_generator(std::nullopt)));
  }
  ~Seeded() {
    if (saved_.defined()) {
      set_state(host_generator(std::nullopt), state_of(cpu()));
      set_state(cpu(), saved_);
    }
  }

 private:
  // One thread at a time exchanges the states: two would restore each other's.
  static std::recursive_mutex& turns() {
    static auto* m = new std::recursive_mutex;
    return *m;
  }
  static at::Tensor state_of(at::Generator g) {
    std::lock_guard<std::mutex> lock(g.mutex());
    return g.get_state();
  }
  static void set_state(at::Generator g, const at::Tensor& state) {
    std::lock_guard<std::mutex> lock(g.mutex());
    g.set_state(state);
  }
  static at::Generator cpu() {
    return at::globalContext().defaultGenerator(c10::Device(c10::kCPU));
  }
  std::unique_lock<std::recursive_mutex> turn_;
  at::Tensor saved_;
};

// Torch warns where an output with elements is resized. The kernels of some losses make it as large
// as the inputs, and then as small as the result: what has its sizes again was not resized.
class Resizes final : public c10::WarningHandler {
 public:
  explicit Resizes(std::vector<at::Tensor> outputs)
      : outputs_(std::move(outputs)),
        outer_(c10::WarningUtils::get_warning_handler()),
        guard_(this) {
    for (const auto& output : outputs_) {
      before_.push_back(output.sizes().vec());
    }
  }
  Resizes(const Resizes&) = delete;
  Resizes& operator=(const Resizes&) = delete;
  ~Resizes() override {
    bool resized = false;
    for (size_t i = 0; i < outputs_.size(); ++i) {
      resized = resized || outputs_[i].sizes() != at::IntArrayRef(before_[i]);
    }
    if (resized) {
      std::for_each(held_.begin(), held_.end(), [&](const auto& w) { outer_->process(w); });
    }
  }
  void process(const c10::Warning& warning) override {
    if (warning.msg().rfind("An output with one or more elements was resized", 0) == 0) {
      held_.push_back(warning);
    } else {
      outer_->process(warning);
    }
  }

 private:
  std::vector<at::Tensor> outputs_;
  std::vector<std::vector<int64_t>> before_;
  std::vector<c10::Warning> held_;
  c10::WarningHandler* outer_;
  c10::WarningUtils::WarningHandlerGuard guard_;
};

// The tensors that the schema says a call writes to.
std::vector<at::Tensor> written(const std::vector<c10::Argument>& declared, const IValue* arguments) {
  std::vector<at::Tensor> outputs;
  for (size_t i = 0; i < declared.size(); ++i) {
    const auto* alias = declared[i].alias_info();
    if (alias != nullptr && alias->isWrite() && arguments[i].isTensor() &&
        arguments[i].toTensor().defined() && !arguments[i].toTensor().is_nested()) {
      outputs.push_back(arguments[i].toTensor());
    }
  }
  return outputs;
}

}  // namespace

void announce(Why why, const char* detail) { announced = {why, detail}; }

void boxed_fallback(const c10::OperatorHandle& op, Stack* stack) {
  auto reason = std::exchange(announced, {});
  enter(op.operator_name(), reason.why, reason.detail);

  const auto& declared = op.schema().arguments();
  const auto first = stack->size() - declared.size();
  auto returns = op.schema().returns().size();
  const auto arguments = at::ArrayRef<IValue>(*stack).slice(first);
  const auto holder = device_of_tensors(arguments), named = named_device(arguments);
  if (holder) {
    check_devices(op, arguments, *holder);
  }
  const bool to_cpu = named && named->is_cpu();  // the results stay there
  const c10::DeviceGuard guard(holder                              ? *holder
                               : named && named->type() == kDeviceType && named->has_index()
                                   ? *named
                                   : current_device());
  bool nested = false;
  std::for_each(arguments.begin(), arguments.end(), [&](const IValue& value) {
    each_tensor(value, [&](const at::Tensor& t) { nested = nested || t.is_nested(); });
  });
  const auto key = nested ? c10::DispatchKey::NestedTensorCPU : c10::DispatchKey::CPU;
  Host host;
  for (size_t i = 0; i < declared.size(); ++i) {
    (*stack)[first + i] = to_host((*stack)[first + i], declared[i], host);
  }
  host.ready();
  {
    at::AutoDispatchBelowADInplaceOrView below;
    auto there = on_cpu(op, *stack, first, key);
    Seeded seeded(there);
    const Resizes resizes(written(declared, stack->data() + first));
    there.redispatchBoxed(c10::DispatchKeySet(key), stack);
  }
  host.settle();
  for (auto value = stack->end() - static_cast<int64_t>(returns); value != stack->end(); ++value) {
    *value = mapped(*value, [&](const at::Tensor& t) { return to_cpu ? t : host.back(t); });
  }
}

Policy fallback_policy() { return ledger().policy.load(); }

std::vector<std::string> allowed_fallbacks() {
  std::lock_guard<std::mutex> lock(ledger().mutex);
  return ledger().allowed;
}

void set_fallback_policy(Policy policy, std::vector<std::string> allowed) {
  std::lock_guard<std::mutex> lock(ledger().mutex);
  ledger().allowed = std::move(allowed);
  ledger().policy.store(policy);
}

void count_native(OpInfo& op) {
  if (op.calls.fetch_add(1, std::memory_order_relaxed) == 0) {
    std::lock_guard<std::mutex> lock(ledger().mutex);
    auto& known = ledger().native;
    if (std::find(known.begin(), known.end(), &op) == known.end()) {
      known.push_back(&op);
    }
  }
}

std::map<std::string, OpCounts> counters() {
  std::map<std::string, OpCounts> counts;
  std::lock_guard<std::mutex> lock(ledger().mutex);
  for (auto* op : ledger().native) {
    if (auto calls = op->calls.load()) {
      counts[op->name].native += calls;
    }
  }
  for (const auto& [op, reasons] : ledger().fallback) {
    counts[c10::toString(op)].fallback = reasons;
  }
  return counts;
}

void reset_counters() {
  std::lock_guard<std::mutex> lock(ledger().mutex);
  for (auto* op : ledger().native) {
    op->calls.store(0);
  }
  ledger().fallback.clear();
}

// Nested tensors of the device go where the CPU has kernels for nested tensors, also in the place of a
// composite, which asks for sizes that they do not have.
void register_nested() {
  constexpr auto key = c10::DispatchKey::NestedTensorPrivateUse1;
  static auto* m = new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findSchema(name);
    if (op && name.name.rfind("aten::", 0) == 0 &&
        op->hasKernelForDispatchKey(c10::DispatchKey::NestedTensorCPU)) {
      m->impl(c10::toString(name).c_str(),
              torch::CppFunction::makeFromBoxedFunction<&boxed_fallback>());
    }
  }
}

void register_stand_ins() {
  register_nested();
  static auto* m = new torch::Library(torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__);
  auto found = [](std::string_view name) {
    auto dot = name.find('.');
    std::string overload(dot == std::string_view::npos ? "" : name.substr(dot + 1));
    return c10::Dispatcher::singleton().findSchema({std::string(name.substr(0, dot)), overload});
  };
  auto registered = [&](const char* name) {
    auto op = found(std::string("aten::") + name);
    return op && op->hasKernelForDispatchKey(kKey);
  };
  auto offer = [&](const char* full, torch::CppFunction kernel) {
    auto op = found(full);
    if (op && !op->hasKernelForDispatchKey(kKey)) {  // a torch that lacks one does not ask for it
      m->impl(full, std::move(kernel));
    }
  };
  for (const auto& made : kMadeOfOut) {
    if (!registered(made.out)) {
      offer((std::string("aten::") + made.name).c_str(),
            torch::CppFunction::makeFromBoxedFunction<&boxed_fallback>());
    }
  }
  for (const auto& pair : kOtherNames) {
    offer(pair.name, torch::CppFunction::makeFromBoxedFunction<&boxed_fallback>());
  }
  for (const auto* name : kNeedTheCpu) {
    offer(name, torch::CppFunction::makeFromBoxedFunction<&boxed_fallback>());
  }
  register_cells(offer);
  register_attention(offer);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&boxed_fallback>());
}
TORCH_LIBRARY_IMPL(_, NestedTensorPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&boxed_fallback>());
}

}  // namespace shiplap::backend
