// How often each op ran natively and how often on the CPU, and why.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <string>

namespace shiplap::backend {

// One per overload, static storage: identity of the cache key and home of the native counter.
struct OpInfo {
  const char* name;  // "aten::add.out"
  std::atomic<int64_t> calls{0};
};

enum class Why : uint8_t { unregistered, dtype, value, layout, empty };

struct OpCounts {
  int64_t native = 0;
  std::map<std::string, int64_t> fallback;  // "dtype: self is Double" -> calls
};

void count_native(OpInfo& op);
std::map<std::string, OpCounts> counters();
void reset_counters();

}  // namespace shiplap::backend
