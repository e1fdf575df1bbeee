// Memory of a discrete device: blocks that are kept when a tensor dies and given to the next one.
//
// A block belongs to the stream that was current when it was allocated. What that stream does next
// comes after what it did with the block, so the block may be given away in it at once; streams that
// `record_stream` named are waited for, by marks, before anyone gets it.
#include <c10/core/CachingDeviceAllocator.h>
#include <shiplap_backend/call.h>
#include <shiplap_backend/queues.h>

#include <algorithm>
#include <list>
#include <map>
#include <mutex>
#include <utility>

namespace shiplap::backend {
namespace {

using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;

constexpr size_t kMost = size_t{1} << 62;
constexpr size_t kSmallest = 512;

// Sizes that are kept apart: eight to each power of two, so at most an eighth is wasted.
size_t room_for(size_t bytes) {
  size_t step = kSmallest;
  while (step * 16 <= bytes) {
    step *= 2;
  }
  return std::max(kSmallest, (bytes + step - 1) / step * step);
}

struct Block {
  void* data;
  size_t bytes, room;  // asked for, and there
  c10::Stream owner;
  c10::SmallVector<c10::Stream, 2> users;  // other streams, by record_stream
};

Stat& aggregate(StatArray& stats) { return stats[0]; }  // StatType::AGGREGATE

class Pool {
 public:
  explicit Pool(c10::DeviceIndex index) : index_(index) {}

  Block* take(size_t bytes) {
    const auto room = room_for(bytes);
    std::unique_lock<std::mutex> lock(mutex_);
    check_limit(bytes);
    collect();
    auto stream = current_stream(index_);
    auto* block = kept(stream, room);
    if (block == nullptr) {
      block = fresh(stream, room, bytes, lock);
    }
    block->bytes = bytes;
    aggregate(stats_.allocation).increase(1);
    aggregate(stats_.active).increase(1);
    aggregate(stats_.allocated_bytes).increase(block->bytes);
    aggregate(stats_.requested_bytes).increase(block->bytes);
    aggregate(stats_.active_bytes).increase(block->bytes);
    ++allocations_;
    return block;
  }

  void give(Block* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    aggregate(stats_.allocation).decrease(1);
    aggregate(stats_.active).decrease(1);
    aggregate(stats_.allocated_bytes).decrease(block->bytes);
    aggregate(stats_.requested_bytes).decrease(block->bytes);
    aggregate(stats_.active_bytes).decrease(block->bytes);
    if (block->users.empty() || in_bad_fork()) {  // no thread of a forked process gives marks
      ready_[key(block)].push_back(block);
      return;
    }
    std::vector<Mark> marks;
    for (const auto& s : block->users) {
      marks.push_back(driver().mark(queue_of(s)));
    }
    block->users.clear();
    waiting_.emplace_back(block, std::move(marks));
  }

  void record(Block* block, const c10::Stream& stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& users = block->users;
    if (stream != block->owner && std::find(users.begin(), users.end(), stream) == users.end()) {
      users.push_back(stream);
    }
  }

  void empty() {
    synchronize(index_);
    std::lock_guard<std::mutex> lock(mutex_);
    release_kept();
  }

  c10::CachingDeviceAllocator::DeviceStats stats() {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
  }
  MemoryStats figures() {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto& held = aggregate(stats_.allocated_bytes);
    return {held.current, held.peak, limit_, allocations_,
            aggregate(stats_.reserved_bytes).current};
  }
  void set_limit(int64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    limit_ = bytes;
  }
  void reset(void (Stat::*how)()) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto* array : {&stats_.allocation, &stats_.segment, &stats_.active,
                        &stats_.allocated_bytes, &stats_.reserved_bytes, &stats_.active_bytes,
                        &stats_.requested_bytes}) {
      (aggregate(*array).*how)();
    }
  }

 private:
  using Key = std::pair<c10::StreamId, size_t>;
  static Key key(const Block* block) { return {block->owner.id(), block->room}; }

  void check_limit(size_t bytes) {
    auto now = aggregate(stats_.allocated_bytes).current;
    auto asked = static_cast<int64_t>(bytes);
    if (limit_ > 0 && asked > limit_ - now) {
      ++stats_.num_ooms;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "device memory limit of ", limit_,
                       " bytes: tried to allocate ", asked, " bytes, ", now,
                       " are in use. Free tensors, or raise the limit with set_memory_limit().");
    }
  }

  // Blocks whose other streams are done go back to those of their own stream.
  void collect() {
    for (auto it = waiting_.begin(); it != waiting_.end();) {
      auto& marks = it->second;
      if (!std::all_of(marks.begin(), marks.end(), [](Mark m) { return driver().passed(m); })) {
        ++it;
        continue;
      }
      std::for_each(marks.begin(), marks.end(), [](Mark m) { driver().drop(m); });
      ready_[key(it->first)].push_back(it->first);
      it = waiting_.erase(it);
    }
  }

  Block* kept(const c10::Stream& stream, size_t room) {
    auto found = ready_.find({stream.id(), room});
    if (found == ready_.end() || found->second.empty()) {
      return nullptr;
    }
    auto* block = found->second.back();
    found->second.pop_back();
    return block;
  }

  Block* fresh(const c10::Stream& stream, size_t room, size_t bytes,
               std::unique_lock<std::mutex>& lock) {
    auto* data = driver().allocate(index_, room);
    if (data == nullptr) {  // what is kept goes back first
      ++stats_.num_alloc_retries;
      lock.unlock();
      empty();
      lock.lock();
      data = driver().allocate(index_, room);
    }
    if (data == nullptr) {
      ++stats_.num_ooms;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "device ", static_cast<int>(index_), " has no ",
                       bytes, " bytes left: ", aggregate(stats_.allocated_bytes).current, " of ",
                       driver().total(index_), " are in use");
    }
    aggregate(stats_.segment).increase(1);
    aggregate(stats_.reserved_bytes).increase(room);
    ++stats_.num_device_alloc;
    return new Block{data, 0, room, stream, {}};
  }

  void release_kept() {
    collect();
    for (auto& [key, blocks] : ready_) {
      for (auto* block : blocks) {
        driver().release(index_, block->data);
        aggregate(stats_.segment).decrease(1);
        aggregate(stats_.reserved_bytes).decrease(block->room);
        ++stats_.num_device_free;
        delete block;
      }
    }
    ready_.clear();
  }

  const c10::DeviceIndex index_;
  std::mutex mutex_;
  std::map<Key, std::vector<Block*>> ready_;
  std::list<std::pair<Block*, std::vector<Mark>>> waiting_;
  c10::CachingDeviceAllocator::DeviceStats stats_;
  int64_t limit_ = 0, allocations_ = 0;
};

Pool& pool(c10::DeviceIndex index) {
  static auto* pools = [] {  // tensors may be freed after static destruction
    auto* all = new std::vector<std::unique_ptr<Pool>>;
    for (c10::DeviceIndex i = 0; i < device_count(); ++i) {
      all->push_back(std::make_unique<Pool>(i));
    }
    return all;
  }();
  check_index(index);
  return *(*pools)[index < 0 ? current_index() : index];
}

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  auto index = block->owner.device_index();
  c10::reportMemoryUsageToProfiler(block->data, -static_cast<int64_t>(block->bytes), 0, 0,
                                   {kDeviceType, index});
  pool(index).give(block);
}

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const auto device = current_device();
    if (bytes == 0) {
      return {nullptr, device};
    }
    TORCH_CHECK_WITH(OutOfMemoryError, bytes <= kMost, "device ",
                     static_cast<int>(device.index()), " has no ", bytes, " bytes");
    auto* block = pool(device.index()).take(bytes);
    c10::reportMemoryUsageToProfiler(block->data, static_cast<int64_t>(bytes),
                                     pool(device.index()).figures().allocated, 0, device);
    return {block->data, block, &free_block, device};
  }
  void copy_data(void* dest, const void* src, size_t count) const override {
    auto queue = current_queue(current_index());
    driver().copy(queue, dest, src, count);
    wait_for(queue);
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { empty_cache(); }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (data.get_deleter() == &free_block) {
      auto* block = static_cast<Block*>(data.get_context());
      pool(block->owner.device_index()).record(block, stream);
    }
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    return pool(index).stats();
  }
  void resetAccumulatedStats(c10::DeviceIndex index) override {
    pool(index).reset(&Stat::reset_accumulated);
  }
  void resetPeakStats(c10::DeviceIndex index) override { reset_peak_memory(index); }
  // Not marked `override`: torch 2.11 does not ask for it.
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) { return memory_info(index); }
};

DeviceAllocator& allocator() {
  static auto* a = new DeviceAllocator;
  return *a;
}

const c10::AllocatorRegisterer<kDeviceType> registered(&allocator());

}  // namespace

c10::Allocator* device_allocator() { return &allocator(); }
MemoryStats memory_stats(c10::DeviceIndex index) { return pool(index).figures(); }
void reset_peak_memory(c10::DeviceIndex index) { pool(index).reset(&Stat::reset_peak); }
void set_memory_limit(c10::DeviceIndex index, int64_t bytes) { pool(index).set_limit(bytes); }
std::pair<size_t, size_t> memory_info(c10::DeviceIndex index) {
  auto total = driver().total(index);
  auto reserved = static_cast<size_t>(pool(index).figures().reserved);
  return {total - std::min(total, reserved), total};
}
void empty_cache() {
  for (c10::DeviceIndex i = 0; i < device_count(); ++i) {
    pool(i).empty();
  }
}

}  // namespace shiplap::backend
