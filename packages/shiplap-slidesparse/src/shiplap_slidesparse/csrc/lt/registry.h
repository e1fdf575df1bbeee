// The one thing this library keeps: plans by problem, and the handles they were made with. Plans
// are added, never changed and never taken away while the process computes, so a call reads them
// without a lock.
#ifndef SHIPLAP_SLIDESPARSE_LT_REGISTRY_H_
#define SHIPLAP_SLIDESPARSE_LT_REGISTRY_H_

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "plan.h"

namespace shiplap::slidesparse::lt {

// An append-only hash table: one writer at a time, readers at any time.
template <class Plan>
class Table {
 public:
  const Plan* find(const Problem& problem) const noexcept {
    const Slots* slots = slots_.load(std::memory_order_acquire);
    if (slots == nullptr) return nullptr;
    const size_t mask = slots->size() - 1;
    for (size_t i = problem.hash() & mask;; i = (i + 1) & mask) {
      const Plan* plan = (*slots)[i].load(std::memory_order_acquire);
      if (plan == nullptr || plan->problem == problem) return plan;
    }
  }

  size_t size() const noexcept { return size_.load(std::memory_order_relaxed); }

  void add(std::unique_ptr<Plan> plan) {
    Slots* slots = slots_.load(std::memory_order_relaxed);
    plans_.reserve(plans_.size() + 1);
    if (slots == nullptr || 2 * (plans_.size() + 1) > slots->size()) {
      // Readers may be in the old one, so it stays: all of them together are no larger than the new
      // one.
      generations_.reserve(generations_.size() + 1);
      auto larger = std::make_unique<Slots>(slots == nullptr ? 64 : 2 * slots->size());
      for (const auto& each : plans_) put(larger.get(), each.get());
      slots = larger.get();
      generations_.push_back(std::move(larger));
    }
    put(slots, plan.get());
    plans_.push_back(std::move(plan));
    size_.store(plans_.size(), std::memory_order_relaxed);
    slots_.store(slots, std::memory_order_release);
  }

 private:
  using Slots = std::vector<std::atomic<const Plan*>>;

  static void put(Slots* slots, const Plan* plan) {
    const size_t mask = slots->size() - 1;
    size_t i = plan->problem.hash() & mask;
    while ((*slots)[i].load(std::memory_order_relaxed) != nullptr) i = (i + 1) & mask;
    (*slots)[i].store(plan, std::memory_order_release);
  }

  std::atomic<Slots*> slots_{nullptr};
  std::atomic<size_t> size_{0};
  std::vector<std::unique_ptr<Slots>> generations_;
  std::vector<std::unique_ptr<Plan>> plans_;
};

class Registry {
 public:
  static constexpr int kDevices = 64;
  static constexpr size_t kMostPlans =
      1 << 16;  // 1 KB to 4 KB each: sizes that never come again are a mistake

  // Opens what is named and not open yet. cuBLASLt and the driver open themselves where they are
  // needed.
  int open(const char* cublaslt, const char* cusparselt, const char* driver, const Version& oldest,
           const Report& report);
  const Cublaslt* cublaslt() const { return cublaslt_.get(); }
  const Cusparselt* cusparselt() const { return cusparselt_.get(); }
  int driver(const Report& report, const Driver** found);

  // The plan for `problem`, made if need be. `stream` says whether a graph is being captured: then
  // making it is kept out of the graph, and without a handle, which would wait for the device, it
  // is an error.
  int plan(const Problem& problem, Stream stream, const Report& report, const DensePlan** found);
  int plan(const Problem& problem, Stream stream, const Report& report, const SparsePlan** found);
  // The handles of a device that is current, with cuSPARSELt opened on it.
  int device(int64_t index, const Report& report, const Device** found);
  size_t plans() const { return dense_.size() + sparse_.size(); }

 private:
  int open_driver(const char* path, const Report& report);
  int open_cublaslt(const char* path, const Report& report);
  int may_make(const Problem& problem, Stream stream, bool has_handle, const Report& report,
               bool* capturing);
  // Calls `make`, which may allocate and load: what a capture would refuse as part of the graph.
  template <class Make>
  int beside_the_graph(bool capturing, const Report& report, const Make& make);
  int own(int64_t index, const Report& report, Device** found);

  std::mutex making_;
  std::unique_ptr<Cublaslt> cublaslt_;
  std::unique_ptr<Cusparselt> cusparselt_;
  std::unique_ptr<Driver> driver_;
  std::unique_ptr<Device>
      devices_[kDevices];  // behind the libraries that they close, before the plans that use them
  Table<DensePlan> dense_;
  Table<SparsePlan> sparse_;
};

// The process's registry. No destructor runs at exit: CUDA may be gone by then.
Registry& registry();
// Destroys all plans and handles and closes the libraries: for tests, when no call and no captured
// graph is left.
void forget();

}  // namespace shiplap::slidesparse::lt

#endif  // SHIPLAP_SLIDESPARSE_LT_REGISTRY_H_
