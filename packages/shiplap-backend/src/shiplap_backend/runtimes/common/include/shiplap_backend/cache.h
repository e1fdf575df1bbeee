// Compiled graphs by what they were built from: bounded, least recently used first out, safe between
// threads.
#pragma once

#include <c10/util/SmallVector.h>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <algorithm>
#include <chrono>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace shiplap::backend {

// What a graph was built from, word by word; two keys are equal only if all of it is.
using Key = c10::SmallVector<int64_t, 48>;

struct KeyHash {
  size_t operator()(const Key& key) const {
    uint64_t h = 0x9E3779B97F4A7C15ull;
    for (auto word : key) {
      h = (h ^ static_cast<uint64_t>(word)) * 0xFF51AFD7ED558CCDull;
      h ^= h >> 32;
    }
    return h;
  }
};

struct CacheInfo {
  int64_t entries, capacity, bytes, limit, hits, misses, evictions;
  double compile_seconds;
};

// Bytes that the process has allocated on its heap.
inline int64_t heap_bytes() {
#ifdef __GLIBC__
#if __GLIBC_PREREQ(2, 33)
  const auto heap = mallinfo2();
  return static_cast<int64_t>(heap.uordblks + heap.hblkhd);
#endif
#endif
  return 0;  // an older glibc has mallinfo, which overflows at 2 GiB
}

// The heap keeps what is freed for later; this gives whole pages back.
inline void trim_heap() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

// Bounded by entries and by the bytes that their values take. The bytes of a value are what the heap
// grew by while it was made and used for the first time, so another thread's allocations may be among
// them, and the sum is corrected when the value goes.
//
// A value that is asked for again after it was removed shows that the limit is below what is in use
// again and again: it doubles then, up to `kMostBytes`, unless it was set. A thousand lengths that each
// come once never do that.
template <class Value>
class Cache {
 public:
  static constexpr int64_t kFirstBytes = int64_t{48} << 20, kMostBytes = int64_t{1} << 30;
  static constexpr int64_t kTrim = int64_t{16} << 20;

  explicit Cache(size_t capacity) : capacity_(capacity) {}

  // The value of `key`, made by `make` on a miss and handed to `use`. Threads that miss the same key make
  // it once, and others are not kept waiting. If `make` throws nothing is kept.
  template <class Make, class Use>
  void with(const Key& key, const Make& make, const Use& use) {
    auto slot = find_or_insert(key);
    std::unique_lock<std::mutex> making(slot->mutex);
    if (slot->value != nullptr) {
      making.unlock();
      use(slot->value);
      return;
    }
    const auto before = heap_bytes();
    const auto start = std::chrono::steady_clock::now();
    try {
      slot->value = make();
    } catch (...) {
      forget(key, slot);
      throw;
    }
    std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
    making.unlock();
    use(slot->value);
    weigh(key, slot, std::max<int64_t>(heap_bytes() - before, 0), spent.count());
  }

  CacheInfo info() {
    std::lock_guard<std::mutex> lock(mutex_);
    return {static_cast<int64_t>(order_.size()),
            static_cast<int64_t>(capacity_),
            bytes_,
            limit_,
            hits_,
            misses_,
            evictions_,
            compile_seconds_};
  }

  void clear() {
    std::lock_guard<std::mutex> lock(mutex_);
    index_.clear();
    order_.clear();
    gone_.clear();
    gone_order_.clear();
    hits_ = misses_ = evictions_ = bytes_ = removed_ = 0;
    compile_seconds_ = 0;
    trim_heap();
  }

  // At most `capacity` values, and `bytes` of them; 0 leaves the bytes to the cache.
  void resize(size_t capacity, int64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    capacity_ = capacity;
    fixed_ = bytes > 0;
    limit_ = fixed_ ? bytes : kFirstBytes;
    evict();
  }

 private:
  struct Slot {
    std::mutex mutex;
    std::shared_ptr<Value> value;
  };
  struct Entry {
    Key key;
    std::shared_ptr<Slot> slot;
    int64_t bytes;
  };

  std::shared_ptr<Slot> find_or_insert(const Key& key) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = index_.find(key);
    if (found != index_.end()) {
      ++hits_;
      order_.splice(order_.begin(), order_, found->second);
      return found->second->slot;
    }
    ++misses_;
    if (gone_.erase(KeyHash()(key)) > 0 && !fixed_) {
      limit_ = std::min(2 * limit_, kMostBytes);
    }
    order_.push_front({key, std::make_shared<Slot>(), 0});
    index_.emplace(key, order_.begin());
    auto slot = order_.front().slot;
    evict();
    return slot;
  }

  void weigh(const Key& key, const std::shared_ptr<Slot>& slot, int64_t bytes, double seconds) {
    std::lock_guard<std::mutex> lock(mutex_);
    compile_seconds_ += seconds;
    auto found = index_.find(key);
    if (found != index_.end() && found->second->slot == slot) {
      bytes += static_cast<int64_t>(sizeof(Entry) + 2 * key.size() * sizeof(int64_t));
      found->second->bytes = bytes;
      bytes_ += bytes;
      evict();
    }
    trim();
  }

  // The last value stays, however large: its call is under way.
  void evict() {
    while (order_.size() > 1 && (order_.size() > capacity_ || bytes_ > limit_)) {
      auto& last = order_.back();
      bytes_ -= last.bytes;
      removed_ += last.bytes;
      if (bytes_ + last.bytes > limit_) {
        note_gone(KeyHash()(last.key));
      }
      index_.erase(last.key);
      order_.pop_back();
      ++evictions_;
    }
  }

  // What is freed lies between values that stay, so the heap would only grow.
  void trim() {
    if (removed_ > kTrim || ++made_ % 256 == 0) {
      removed_ = 0;
      trim_heap();
    }
  }

  void note_gone(size_t hash) {
    if (gone_.insert(hash).second) {
      gone_order_.push_back(hash);
    }
    if (gone_order_.size() > 4 * capacity_) {
      gone_.erase(gone_order_.front());
      gone_order_.pop_front();
    }
  }

  void forget(const Key& key, const std::shared_ptr<Slot>& slot) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = index_.find(key);
    if (found != index_.end() && found->second->slot == slot) {
      order_.erase(found->second);
      index_.erase(found);
    }
  }

  std::mutex mutex_;
  size_t capacity_;
  int64_t limit_ = kFirstBytes;
  bool fixed_ = false;
  std::list<Entry> order_;  // most recently used first
  std::unordered_map<Key, typename std::list<Entry>::iterator, KeyHash> index_;
  std::unordered_set<size_t> gone_;  // hashes of the keys that were removed
  std::deque<size_t> gone_order_;
  int64_t hits_ = 0, misses_ = 0, evictions_ = 0, bytes_ = 0, removed_ = 0, made_ = 0;
  double compile_seconds_ = 0;
};

}  // namespace shiplap::backend
