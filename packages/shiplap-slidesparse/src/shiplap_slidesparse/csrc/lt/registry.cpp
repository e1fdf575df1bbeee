#include "registry.h"

#include <cstring>

namespace shiplap::slidesparse::lt {
namespace {

constexpr Status kNotInitialised = 3, kNoContext = 201;  // CUDA_ERROR_..., of the driver
constexpr int kRelaxed = 2;                              // CU_STREAM_CAPTURE_MODE_RELAXED

}  // namespace

bool Problem::operator==(const Problem& other) const {
  return std::memcmp(this, &other, sizeof *this) == 0;
}

size_t Problem::hash() const {
  uint64_t mixed = 0;
  const auto* words = reinterpret_cast<const uint64_t*>(this);
  for (size_t i = 0; i < sizeof *this / sizeof *words; ++i) {
    mixed = (mixed ^ words[i]) * 0x9E3779B97F4A7C15u;
    mixed ^= mixed >> 32;
  }
  return mixed;
}

// Created at the first call and never destroyed: `forget` is the only way to an end.
extern "C" __attribute__((visibility("hidden"))) std::atomic<Registry*> slidesparse_lt_registry;
std::atomic<Registry*> slidesparse_lt_registry{nullptr};
// Read by `shiplap audit`.
extern "C" SL_EXPORT const char shiplap_keeps[];
const char shiplap_keeps[] =
    "slidesparse_lt_registry: plans by problem and handles by device, added, never changed "
    "or removed";

Registry& registry() {
  Registry* found = slidesparse_lt_registry.load(std::memory_order_acquire);
  if (found != nullptr) return *found;
  auto* fresh = new Registry;
  if (slidesparse_lt_registry.compare_exchange_strong(found, fresh)) return *fresh;
  delete fresh;
  return *found;
}

void forget() { delete slidesparse_lt_registry.exchange(nullptr); }

int Registry::open(const char* cublaslt, const char* cusparselt, const char* driver,
                   const Version& oldest, const Report& report) {
  const std::lock_guard<std::mutex> guard(making_);
  if (driver[0] != 0) SHIPLAP_LT_TRY(open_driver(driver, report));
  if (cublaslt[0] != 0) SHIPLAP_LT_TRY(open_cublaslt(cublaslt, report));
  if (cusparselt[0] == 0 || cusparselt_ != nullptr) return SL_OK;
  auto loaded = std::make_unique<Cusparselt>();
  SHIPLAP_LT_TRY(loaded->load(cusparselt, oldest, report));
  cusparselt_ = std::move(loaded);
  return SL_OK;
}

int Registry::open_driver(const char* path, const Report& report) {
  if (driver_ != nullptr) return SL_OK;
  auto loaded = std::make_unique<Driver>();
  SHIPLAP_LT_TRY(loaded->load(path, report));
  driver_ = std::move(loaded);
  return SL_OK;
}

int Registry::open_cublaslt(const char* path, const Report& report) {
  if (cublaslt_ != nullptr) return SL_OK;
  auto loaded = std::make_unique<Cublaslt>();
  SHIPLAP_LT_TRY(loaded->load(path, report));
  cublaslt_ = std::move(loaded);
  return SL_OK;
}

int Registry::own(int64_t index, const Report& report, Device** found) {
  if (index < 0 || index >= kDevices)
    return report.fail(SL_INVALID_ARGUMENT, "no device %lld", static_cast<long long>(index));
  if (devices_[index] == nullptr) devices_[index] = std::make_unique<Device>();
  *found = devices_[index].get();
  return SL_OK;
}

int Registry::may_make(const Problem& p, Stream stream, bool has_handle, const Report& report,
                       bool* capturing) {
  int answer = 0;
  const Status status = driver_->cuStreamIsCapturing(stream, &answer);
  *capturing = answer != 0;
  if (status == kNotInitialised || status == kNoContext) {
    return report.fail(SL_INVALID_ARGUMENT,
                       "CUDA has not begun in this process: put a tensor on the device first");
  }
  // While another stream captures, asking about the default stream is an error.
  if (status != 0 || (*capturing && !has_handle)) {
    return report.fail(SL_INVALID_ARGUMENT,
                       "no plan for m=%lld n=%lld k=%lld with algorithm %lld, and the library has "
                       "not begun on this device, or on this stream, before a CUDA graph is "
                       "captured: run it once before (slidesparse.prepare)",
                       static_cast<long long>(p.m), static_cast<long long>(p.n),
                       static_cast<long long>(p.k), static_cast<long long>(p.algorithm));
  }
  if (plans() >= kMostPlans) {
    return report.fail(SL_INTERNAL,
                       "%zu plans are kept already: pad rows to fewer different numbers", plans());
  }
  return SL_OK;
}

template <class Make>
int Registry::beside_the_graph(bool capturing, const Report& report, const Make& make) {
  int mode = kRelaxed;
  const auto exchange = [&] {
    const Status status = capturing ? driver_->cuThreadExchangeStreamCaptureMode(&mode) : 0;
    return status == 0 ? static_cast<int>(SL_OK)
                       : report.fail(SL_INTERNAL, "cuThreadExchangeStreamCaptureMode: status %d",
                                     status);
  };
  SHIPLAP_LT_TRY(exchange());
  const int made = make();
  SHIPLAP_LT_TRY(exchange());  // back to what it was
  return made;
}

int Registry::plan(const Problem& problem, Stream stream, const Report& report,
                   const DensePlan** found) {
  if ((*found = dense_.find(problem)) != nullptr) return SL_OK;
  const std::lock_guard<std::mutex> guard(making_);
  if ((*found = dense_.find(problem)) != nullptr) return SL_OK;
  SHIPLAP_LT_TRY(open_driver("", report));
  SHIPLAP_LT_TRY(open_cublaslt("", report));
  Device* device = nullptr;
  SHIPLAP_LT_TRY(own(problem.device, report, &device));
  bool capturing = false;
  SHIPLAP_LT_TRY(
      may_make(problem, stream, device->dense_api != nullptr, report, &capturing));
  return beside_the_graph(capturing, report, [&]() -> int {
    SHIPLAP_LT_TRY(device->open_dense(*cublaslt_, report));
    std::unique_ptr<DensePlan> made;
    SHIPLAP_LT_TRY(DensePlan::make(*device, problem, report, &made));
    *found = made.get();
    dense_.add(std::move(made));
    return SL_OK;
  });
}

int Registry::plan(const Problem& problem, Stream stream, const Report& report,
                   const SparsePlan** found) {
  if ((*found = sparse_.find(problem)) != nullptr) return SL_OK;
  const std::lock_guard<std::mutex> guard(making_);
  if ((*found = sparse_.find(problem)) != nullptr) return SL_OK;
  SHIPLAP_LT_TRY(open_driver("", report));
  Device* device = nullptr;
  SHIPLAP_LT_TRY(own(problem.device, report, &device));
  bool capturing = false;
  SHIPLAP_LT_TRY(
      may_make(problem, stream, device->sparse_api != nullptr, report, &capturing));
  if (cusparselt_ == nullptr) {
    return report.fail(SL_UNSUPPORTED,
                       "cuSPARSELt is not open in this process: ask "
                       "shiplap_slidesparse.lt.available() first");
  }
  return beside_the_graph(capturing, report, [&]() -> int {
    SHIPLAP_LT_TRY(device->open_sparse(*cusparselt_, report));
    std::unique_ptr<SparsePlan> made;
    SHIPLAP_LT_TRY(SparsePlan::make(*device, problem, report, &made));
    *found = made.get();
    sparse_.add(std::move(made));
    return SL_OK;
  });
}

int Registry::driver(const Report& report, const Driver** found) {
  const std::lock_guard<std::mutex> guard(making_);
  SHIPLAP_LT_TRY(open_driver("", report));
  *found = driver_.get();
  return SL_OK;
}

int Registry::device(int64_t index, const Report& report, const Device** found) {
  const std::lock_guard<std::mutex> guard(making_);
  if (cusparselt_ == nullptr)
    return report.fail(SL_UNSUPPORTED, "cuSPARSELt is not open in this process");
  Device* device = nullptr;
  SHIPLAP_LT_TRY(own(index, report, &device));
  SHIPLAP_LT_TRY(device->open_sparse(*cusparselt_, report));
  *found = device;
  return SL_OK;
}

}  // namespace shiplap::slidesparse::lt
