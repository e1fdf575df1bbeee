// Compiled graphs by what they were built from: bounded, least recently used first out, safe
// between threads.
#pragma once

#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>

#include <chrono>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>

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
  int64_t entries, capacity, hits, misses, evictions;
  double compile_seconds;
};

template <class Value>
class Cache {
 public:
  explicit Cache(size_t capacity) : capacity_(capacity) {}

  // The value of `key`, made by `make` on a miss. Threads that miss the same key make it once, and
  // others are not kept waiting. If `make` throws nothing is kept.
  std::shared_ptr<Value> get(const Key& key, c10::function_ref<std::shared_ptr<Value>()> make) {
    auto slot = find_or_insert(key);
    std::lock_guard<std::mutex> making(slot->mutex);
    if (slot->value == nullptr) {
      auto start = std::chrono::steady_clock::now();
      try {
        slot->value = make();
      } catch (...) {
        forget(key, slot);
        throw;
      }
      std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
      std::lock_guard<std::mutex> lock(mutex_);
      compile_seconds_ += spent.count();
    }
    return slot->value;
  }

  CacheInfo info() {
    std::lock_guard<std::mutex> lock(mutex_);
    return {static_cast<int64_t>(order_.size()),
            static_cast<int64_t>(capacity_),
            hits_,
            misses_,
            evictions_,
            compile_seconds_};
  }

  void clear() {
    std::lock_guard<std::mutex> lock(mutex_);
    index_.clear();
    order_.clear();
    hits_ = misses_ = evictions_ = 0;
    compile_seconds_ = 0;
  }

  void resize(size_t capacity) {
    std::lock_guard<std::mutex> lock(mutex_);
    capacity_ = capacity;
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
    order_.push_front({key, std::make_shared<Slot>()});
    index_.emplace(key, order_.begin());
    auto slot = order_.front().slot;
    evict();
    return slot;
  }

  void evict() {
    while (order_.size() > capacity_) {
      index_.erase(order_.back().key);
      order_.pop_back();
      ++evictions_;
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
  std::list<Entry> order_;  // most recently used first
  std::unordered_map<Key, typename std::list<Entry>::iterator, KeyHash> index_;
  int64_t hits_ = 0, misses_ = 0, evictions_ = 0;
  double compile_seconds_ = 0;
};

}  // namespace shiplap::backend
