// Pinned memory of a discrete device: host memory that a stream may still be copying when its tensor
// is gone. A block is given away when the marks of its copies are passed.
#include <c10/core/CPUAllocator.h>
#include <shiplap_backend/queues.h>

#include <algorithm>
#include <bit>
#include <map>
#include <mutex>

namespace shiplap::backend {
namespace {

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) {
      return {nullptr, c10::Device(c10::kCPU)};
    }
    const auto room = std::bit_ceil(std::max<size_t>(bytes, 64));
    std::lock_guard<std::mutex> lock(mutex_);
    auto free = std::find_if(blocks_.begin(), blocks_.end(), [&](auto& entry) {
      return !entry.second.used && entry.second.room == room && done(entry.second);
    });
    auto* data = free != blocks_.end() ? reinterpret_cast<void*>(free->first)
                                       : c10::GetCPUAllocator()->raw_allocate(room);
    auto& block = blocks_[reinterpret_cast<uintptr_t>(data)];
    block.room = room;
    block.used = true;
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* dest, const void* src, size_t count) const override {
    default_copy_data(dest, src, count);
  }
  bool holds(const void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto* block = around(data);
    return block != nullptr && block->used;
  }
  void use(const void* data, Queue queue) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (auto* block = around(data)) {
      done(*block);
      block->marks.push_back(driver().mark(queue));
    }
  }
  static PinnedAllocator& instance() {
    static auto* a = new PinnedAllocator;
    return *a;
  }

 private:
  struct Block {
    size_t room = 0;
    bool used = false;
    std::vector<Mark> marks;  // of copies
  };

  Block* around(const void* data) {
    auto at = reinterpret_cast<uintptr_t>(data);
    auto after = blocks_.upper_bound(at);
    if (after == blocks_.begin()) {
      return nullptr;
    }
    auto& [begin, block] = *std::prev(after);
    return at < begin + block.room ? &block : nullptr;
  }
  // Whether no copy of the block is outstanding. Forgets those that are done.
  static bool done(Block& block) {
    std::erase_if(block.marks, [](Mark m) {
      auto passed = driver().passed(m);
      if (passed) {
        driver().drop(m);
      }
      return passed;
    });
    return block.marks.empty();
  }
  static void release(void* data) {
    std::lock_guard<std::mutex> lock(instance().mutex_);
    instance().blocks_[reinterpret_cast<uintptr_t>(data)].used = false;
  }

  std::mutex mutex_;
  std::map<uintptr_t, Block> blocks_;
};

}  // namespace

c10::Allocator* pinned_allocator() { return &PinnedAllocator::instance(); }
bool is_pinned(const void* data) { return PinnedAllocator::instance().holds(data); }
void use_pinned(const void* data, Queue queue) { PinnedAllocator::instance().use(data, queue); }

}  // namespace shiplap::backend
