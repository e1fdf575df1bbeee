// Shared memory: the device's is the host's, one device, and every op is done when its call returns.
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <shiplap_backend/memory.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace shiplap::backend {
namespace {

using c10::CachingAllocator::StatType;

constexpr size_t kAlignment =
    64;  // a cache line, and what AVX-512 loads want; also the room of the header
constexpr size_t kMost = size_t{1} << 62;
const c10::Device kDevice(kDeviceType, 0);  // the only one

// Counts bytes. Lock-free: two relaxed additions for an allocation.
class Account {
 public:
  // Throws when the limit would be passed; nothing is counted then.
  void take(size_t bytes) {
    auto n = static_cast<int64_t>(bytes);
    auto now = current_.fetch_add(n, std::memory_order_relaxed) + n;
    auto limit = limit_.load(std::memory_order_relaxed);
    if (limit > 0 && now > limit) {
      current_.fetch_sub(n, std::memory_order_relaxed);
      TORCH_CHECK_WITH(OutOfMemoryError, false, "device memory limit of ", limit,
                       " bytes: tried to allocate ", n, " bytes, ", now - n,
                       " are in use. Free tensors, or raise the limit with set_memory_limit().");
    }
    allocations_.fetch_add(1, std::memory_order_relaxed);
    auto peak = peak_.load(std::memory_order_relaxed);
    while (now > peak && !peak_.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
    }
  }
  void give(size_t bytes) {
    current_.fetch_sub(static_cast<int64_t>(bytes), std::memory_order_relaxed);
  }
  MemoryStats stats() const {
    return {current_.load(), peak_.load(), limit_.load(), allocations_.load(), current_.load()};
  }
  void reset_peak() { peak_.store(current_.load()); }
  void set_limit(int64_t bytes) { limit_.store(bytes); }

 private:
  std::atomic<int64_t> current_{0}, peak_{0}, limit_{0}, allocations_{0};
};

Account& account() {
  static auto* a = new Account;  // tensors may be freed after static destruction
  return *a;
}

void report(void* data, int64_t change) {
  c10::reportMemoryUsageToProfiler(data, change, account().stats().allocated, 0, kDevice);
}

// The size stands in the 64 bytes before the data.
void free_block(void* data) {
  auto* block = static_cast<char*>(data) - kAlignment;
  size_t bytes;
  std::memcpy(&bytes, block, sizeof bytes);
  account().give(bytes);
  report(data, -static_cast<int64_t>(bytes));
  std::free(block);
}

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) {
      return {nullptr, kDevice};
    }
    // Beyond this the sums below would wrap around; no host has as much.
    TORCH_CHECK_WITH(OutOfMemoryError, bytes <= kMost, "the host has no ", bytes,
                     " bytes for the device");
    account().take(bytes);
    auto room = (bytes + 2 * kAlignment - 1) / kAlignment * kAlignment;
    auto* block = static_cast<char*>(std::aligned_alloc(kAlignment, room));
    if (block == nullptr) {
      account().give(bytes);
      TORCH_CHECK_WITH(OutOfMemoryError, false, "the host has no ", bytes,
                       " bytes left for the device");
    }
    std::memcpy(block, &bytes, sizeof bytes);
    auto* data = block + kAlignment;
    report(data, static_cast<int64_t>(bytes));
    return {data, data, &free_block, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* dest, const void* src, size_t count) const override {
    default_copy_data(dest, src, count);
  }

  // What torch.accelerator.memory_* asks.
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto now = account().stats();
    auto& bytes = stats.allocated_bytes[static_cast<size_t>(StatType::AGGREGATE)];
    bytes.current = now.allocated;
    bytes.peak = now.peak;
    stats.reserved_bytes = stats.active_bytes = stats.requested_bytes = stats.allocated_bytes;
    stats.num_device_alloc = now.allocations;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { account().reset_peak(); }
  // Not marked `override`: torch 2.11 does not ask for it.
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) { return memory_info(index); }
};

// Pinned host memory is host memory that we remember: transfers are copies within the host anyway.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) {
      return {nullptr, c10::Device(c10::kCPU)};
    }
    void* data = c10::GetCPUAllocator()->raw_allocate(bytes);
    std::lock_guard<std::mutex> lock(mutex_);
    blocks_[reinterpret_cast<uintptr_t>(data)] = bytes;
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* dest, const void* src, size_t count) const override {
    default_copy_data(dest, src, count);
  }
  bool holds(const void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto at = reinterpret_cast<uintptr_t>(data);
    auto after = blocks_.upper_bound(at);
    return after != blocks_.begin() && at < std::prev(after)->first + std::prev(after)->second;
  }
  static PinnedAllocator& instance() {
    static auto* a = new PinnedAllocator;
    return *a;
  }

 private:
  static void release(void* data) {
    {
      std::lock_guard<std::mutex> lock(instance().mutex_);
      instance().blocks_.erase(reinterpret_cast<uintptr_t>(data));
    }
    c10::GetCPUAllocator()->raw_deallocate(data);
  }
  std::mutex mutex_;
  std::map<uintptr_t, size_t> blocks_;
};

DeviceAllocator& allocator() {
  static auto* a = new DeviceAllocator;
  return *a;
}

const c10::AllocatorRegisterer<kDeviceType> registered(&allocator());

void release_storage(void* storage) {
  c10::intrusive_ptr<c10::StorageImpl>::reclaim(static_cast<c10::StorageImpl*>(storage));
}

struct Adopted {
  c10::Storage host;
  size_t bytes;
};

void release_adopted(void* context) {
  auto* adopted = static_cast<Adopted*>(context);
  account().give(adopted->bytes);
  delete adopted;
}

}  // namespace

c10::DeviceIndex device_count() { return 1; }
c10::DeviceIndex current_index() { return 0; }
void set_current_index(c10::DeviceIndex) {}
void synchronize(c10::DeviceIndex) {}

MemoryStats memory_stats(c10::DeviceIndex) { return account().stats(); }
void reset_peak_memory(c10::DeviceIndex) { account().reset_peak(); }
void set_memory_limit(c10::DeviceIndex, int64_t bytes) { account().set_limit(bytes); }
std::pair<size_t, size_t> memory_info(c10::DeviceIndex) {
  auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return {page * static_cast<size_t>(sysconf(_SC_AVPHYS_PAGES)),
          page * static_cast<size_t>(sysconf(_SC_PHYS_PAGES))};
}
void empty_cache() {}  // memory goes back to the host when a tensor dies

c10::Allocator* device_allocator() { return &allocator(); }
c10::Allocator* pinned_allocator() { return &PinnedAllocator::instance(); }
bool is_pinned(const void* data) { return PinnedAllocator::instance().holds(data); }

c10::Storage host_storage(const c10::Storage& storage) {
  auto* kept = c10::Storage(storage).unsafeReleaseStorageImpl();
  auto bytes = kept->nbytes();
  c10::DataPtr view(kept->mutable_data(), kept, &release_storage, c10::Device(c10::kCPU));
  // Resizable: an out= that a CPU kernel enlarges gets new memory, which the fallback hands on to
  // the device tensor.
  return {c10::Storage::use_byte_size_t(), bytes, std::move(view), c10::GetCPUAllocator(),
          /*resizable=*/true};
}

c10::Storage device_storage(const c10::Storage& host) {
  auto bytes = host.nbytes();
  account().take(bytes);
  c10::DataPtr view(host.mutable_data(), new Adopted{host, bytes}, &release_adopted, kDevice);
  return {c10::Storage::use_byte_size_t(), bytes, std::move(view), device_allocator(),
          /*resizable=*/true};
}

void read_extent(const at::Tensor&, void*) {}
void write_extent(const at::Tensor&, const void*) {}
void upload(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }

// torch's own CPU copy knows every dtype, stride, broadcast and conjugate.
void copy(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  host_view(to).copy_(host_view(from), non_blocking);
}

}  // namespace shiplap::backend
