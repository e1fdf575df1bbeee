// What torch's profiler learns of the kernels: when each ran on the device.
#pragma once

#include <shiplap_backend/memory.h>

#include <cstdint>
#if SHIPLAP_DISCRETE
#include <shiplap_backend/driver.h>
#endif

namespace shiplap::backend {

// A moment on the device: a mark in a queue, or the host's clock in nanoseconds.
#if SHIPLAP_DISCRETE
using Moment = Mark;
#else
using Moment = int64_t;
#endif

// One kernel of the calling thread's stream, which is put into it while this object lives. Costs a
// load of a flag unless a profiler records.
class Profiled {
 public:
  explicit Profiled(const char* name);
  ~Profiled();
  Profiled(const Profiled&) = delete;
  Profiled& operator=(const Profiled&) = delete;

 private:
  const char* name_;  // null: nobody records. Of static storage
  Moment begin_{};
};

}  // namespace shiplap::backend
