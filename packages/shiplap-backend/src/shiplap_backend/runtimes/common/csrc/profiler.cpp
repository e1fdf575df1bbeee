// Times of kernels for torch.profiler. A torch with the header below (2.13 and 2.15 have it, 2.11 has
// not) asks a session of the device, which kineto starts and stops, for what ran meanwhile. The older
// kind of profiler, `use_kineto=False`, puts an event of the device before and after each operator.
#include <c10/core/DeviceGuard.h>
#include <shiplap_backend/profiler.h>
#include <torch/csrc/profiler/stubs/base.h>
#if SHIPLAP_DISCRETE
#include <shiplap_backend/queues.h>
#endif
#if __has_include(<torch/csrc/profiler/standalone/privateuse1_profiler.h>)
#define SHIPLAP_KINETO 1
#ifndef USE_KINETO
#define USE_KINETO
#endif
#include <libkineto.h>
#include <torch/csrc/profiler/standalone/privateuse1_profiler.h>
#endif

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace shiplap::backend {
namespace {

int64_t host_now() {
  auto since = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

#if SHIPLAP_DISCRETE
Moment now() { return driver().mark(current_queue(current_index())); }
int64_t stream_now() { return current_stream(current_index()).id(); }
void reach(Moment moment) { driver().wait(moment); }
void drop(Moment moment) { driver().drop(moment); }
int64_t between(Moment from, Moment to) {
  return static_cast<int64_t>(driver().milliseconds(from, to) * 1e6);
}
#else
Moment now() { return host_now(); }
int64_t stream_now() { return 0; }
void reach(Moment) {}
void drop(Moment) {}
int64_t between(Moment from, Moment to) { return to - from; }
#endif

struct Kernel {
  const char* name;
  c10::DeviceIndex device;
  int64_t stream;
  uint64_t caller;  // the operator's number in the profiler
  Moment begin, end;
};

// A moment of a device, and the host's clock then.
struct Anchor {
  Moment moment;
  int64_t host;
};

struct Records {
  std::atomic<bool> on{false};
  std::mutex mutex;
  std::vector<Kernel> kernels;
  std::map<c10::DeviceIndex, Anchor> anchors;
};

Records& records() {
  static auto* r = new Records;
  return *r;
}

thread_local std::vector<uint64_t> callers;

// The first kernel of a device waits for its stream once: vendors tell distances between moments only.
void anchor() {
  auto& r = records();
  std::lock_guard<std::mutex> lock(r.mutex);
  if (r.anchors.count(current_index()) == 0) {
    auto moment = now();
    reach(moment);
    r.anchors[current_index()] = {moment, host_now()};
  }
}

}  // namespace

Profiled::Profiled(const char* name)
    : name_(records().on.load(std::memory_order_relaxed) ? name : nullptr) {
  if (name_ != nullptr) {
    anchor();
    begin_ = now();
  }
}

Profiled::~Profiled() {
  if (name_ != nullptr) {
    auto caller = callers.empty() ? 0 : callers.back();
    Kernel kernel{name_, current_index(), stream_now(), caller, begin_, now()};
    std::lock_guard<std::mutex> lock(records().mutex);
    records().kernels.push_back(kernel);
  }
}

namespace {

#ifdef SHIPLAP_KINETO

using libkineto::ActivityType;

class Session final : public libkineto::IActivityProfilerSession {
 public:
  void start() override {
    forget();
    records().on = true;
    status_ = libkineto::TraceStatus::RECORDING;
  }
  void stop() override {
    records().on = false;
    status_ = libkineto::TraceStatus::PROCESSING;
  }
  std::vector<std::string> errors() override { return {}; }
  void processTrace(libkineto::ActivityLogger& logger) override {
    processTrace(logger, [](int32_t) { return nullptr; }, 0, INT64_MAX);
  }
  void processTrace(libkineto::ActivityLogger& logger, libkineto::getLinkedActivityCallback linked,
                    int64_t first, int64_t last) override {
    auto& r = records();
    std::lock_guard<std::mutex> lock(r.mutex);
    buffer_->span = libkineto::TraceSpan(first, last, "device");
    for (const auto& kernel : r.kernels) {
      reach(kernel.end);
      const auto& anchor = r.anchors.at(kernel.device);
      buffer_->emplace_activity(buffer_->span, ActivityType::CONCURRENT_KERNEL, kernel.name);
      auto& told = *buffer_->activities.back();
      told.startTime = anchor.host + between(anchor.moment, kernel.begin);
      told.endTime = anchor.host + between(anchor.moment, kernel.end);
      told.id = static_cast<int32_t>(kernel.caller);
      told.device = kernel.device;
      told.resource = static_cast<int32_t>(kernel.stream);
      told.linked = linked(static_cast<int32_t>(kernel.caller));
      told.log(logger);
    }
  }
  std::unique_ptr<libkineto::DeviceInfo> getDeviceInfo() override { return nullptr; }
  std::vector<libkineto::ResourceInfo> getResourceInfos() override { return {}; }
  std::unique_ptr<libkineto::CpuTraceBuffer> getTraceBuffer() override {
    forget();
    return std::move(buffer_);
  }
  void pushCorrelationId(uint64_t id) override { callers.push_back(id); }
  void popCorrelationId() override {
    if (!callers.empty()) {
      callers.pop_back();
    }
  }

 private:
  static void forget() {
    auto& r = records();
    std::lock_guard<std::mutex> lock(r.mutex);
    for (const auto& kernel : r.kernels) {
      drop(kernel.begin);
      drop(kernel.end);
    }
    for (const auto& entry : r.anchors) {
      drop(entry.second.moment);
    }
    r.kernels.clear();
    r.anchors.clear();
  }

  std::unique_ptr<libkineto::CpuTraceBuffer> buffer_ = std::make_unique<libkineto::CpuTraceBuffer>();
};

class Profiler final : public libkineto::IActivityProfiler {
 public:
  const std::string& name() const override { return name_; }
  const std::set<ActivityType>& availableActivities() const override { return kinds_; }
  std::unique_ptr<libkineto::IActivityProfilerSession> configure(
      const std::set<ActivityType>& asked, const libkineto::Config&) override {
    return asked.count(ActivityType::CONCURRENT_KERNEL) != 0 ? std::make_unique<Session>() : nullptr;
  }
  std::unique_ptr<libkineto::IActivityProfilerSession> configure(
      int64_t, int64_t, const std::set<ActivityType>& asked,
      const libkineto::Config& config) override {
    return configure(asked, config);
  }

 private:
  std::string name_ = "shiplap";
  std::set<ActivityType> kinds_{ActivityType::CONCURRENT_KERNEL};
};

REGISTER_PRIVATEUSE1_PROFILER(Profiler);

#endif

// Events around operators.
class Stubs final : public torch::profiler::impl::ProfilerStubs {
 public:
  using Event = torch::profiler::impl::ProfilerVoidEventStub;

  void record(c10::DeviceIndex* device, Event* event, int64_t* cpu_ns) const override {
    if (device != nullptr) {
      *device = current_index();
    }
    if (cpu_ns != nullptr) {
      *cpu_ns = host_now();
    }
    *event = Event(new Moment(now()), [](void* held) {
      auto* moment = static_cast<Moment*>(held);
      drop(*moment);
      delete moment;
    });
  }
  float elapsed(const Event* from, const Event* to) const override {  // microseconds
    auto &first = *static_cast<Moment*>(from->get()), &last = *static_cast<Moment*>(to->get());
    reach(first);
    reach(last);
    return static_cast<float>(between(first, last)) / 1e3F;
  }
  void mark(const char*) const override {}
  void rangePush(const char*) const override {}
  void rangePop() const override {}
  bool enabled() const override { return true; }
  void onEachDevice(std::function<void(int)> visit) const override {
    for (c10::DeviceIndex i = 0; i < device_count(); ++i) {
      const c10::DeviceGuard guard({kDeviceType, i});
      visit(i);
    }
  }
  void synchronize() const override { backend::synchronize(current_index()); }
};

[[maybe_unused]] const bool registered = [] {
  static Stubs stubs;
  torch::profiler::impl::registerPrivateUse1Methods(&stubs);
  return true;
}();

}  // namespace
}  // namespace shiplap::backend
