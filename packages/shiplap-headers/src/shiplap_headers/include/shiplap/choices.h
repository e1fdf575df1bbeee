// Which config an op's calls of a bucket get: a table that is written once and replaced whole. No torch, no allocation in
// a lookup.
#pragma once

#include <atomic>
#include <bit>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

namespace shiplap {

// Sizes of a bucket: the next power of two.
inline int64_t rounded(int64_t size) {
  return size <= 0 ? 0 : static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(size)));
}

class Table {
 public:
  // `rows`: per entry `key` numbers, then 1 if Python has to serve it, then `config` numbers.
  Table(const int64_t* rows, size_t count, size_t key, size_t config, bool defer_missing)
      : key_(key), width_(key + config + 2), defer_missing_(defer_missing) {
    mask_ = std::bit_ceil(2 * count + 1) - 1;
    slots_.assign((mask_ + 1) * width_, 0);
    for (size_t i = 0; i < count; ++i) {
      const int64_t* row = rows + i * (key + 1 + config);
      int64_t* slot = find(row);
      slot[0] = 1;
      std::memcpy(slot + 1, row, (width_ - 1) * sizeof(int64_t));
    }
  }

  // Whether Python has to serve the call; else `config` points to what the table says, or stays as it is.
  bool look(const int64_t* key, const int64_t** config) const {
    const int64_t* slot = const_cast<Table*>(this)->find(key);
    if (slot[0] == 0) return defer_missing_;
    if (slot[1 + key_] != 0) return true;
    *config = slot + 2 + key_;
    return false;
  }

 private:
  int64_t* find(const int64_t* key) {
    uint64_t hash = 0x9E3779B97F4A7C15u;
    for (size_t i = 0; i < key_; ++i) {
      hash = (hash ^ static_cast<uint64_t>(key[i])) * 0xFF51AFD7ED558CCDu;
      hash ^= hash >> 32;
    }
    for (size_t at = hash & mask_;; at = (at + 1) & mask_) {  // never full: at most half of the slots are taken
      int64_t* slot = slots_.data() + at * width_;
      if (slot[0] == 0 || std::memcmp(slot + 1, key, key_ * sizeof(int64_t)) == 0) return slot;
    }
  }

  size_t key_, width_, mask_ = 0;
  bool defer_missing_;
  std::vector<int64_t> slots_;
};

// The table in force. Old ones stay: a call of another thread may be looking, and there are as many as there were tunings.
class Choices {
 public:
  const Table* table() const { return table_.load(std::memory_order_acquire); }
  void set(std::unique_ptr<const Table> table) {
    const std::lock_guard<std::mutex> alone(setting_);
    table_.store(table.get(), std::memory_order_release);
    if (table) kept_.push_back(std::move(table));
  }

 private:
  std::mutex setting_;
  std::atomic<const Table*> table_{nullptr};
  std::vector<std::unique_ptr<const Table>> kept_;
};

}  // namespace shiplap
