// Launches that were recorded once and are made again with other addresses: what an eager call of a template does from
// its second time on. Torch's allocator and current stream, the CUDA driver, no Python.
#pragma once

#include <algorithm>
#include <stdexcept>

#include "shiplap/native.h"
#include "shiplap/triton.h"

namespace shiplap::replay {

// What a parameter of a kernel is: a number, the address of a tensor of the call, or a place in the scratch memory.
enum Kind : int64_t { kNumber = 0, kTensor = 1, kScratch = 2 };

struct Launch {
  triton::Handle function;
  unsigned x, y, z, threads, shared;
  std::vector<std::pair<int64_t, int64_t>> parameters;
};

// Launches of one call, in order on one stream, with the scratch memory that they share.
struct Recording {
  int32_t device;
  int64_t scratch;
  uint64_t tensors = 0;  // that a call has to bring
  std::vector<Launch> launches;

  // Written as numbers: device, bytes of scratch, launches; of each function, grid, threads, shared memory, parameters;
  // of each parameter kind and value. Throws std::exception for numbers that are none.
  explicit Recording(const std::vector<int64_t>& words) {
    size_t at = 0;
    const auto next = [&] { return words.at(at++); };
    const auto small = [&] { return static_cast<unsigned>(next()); };
    device = static_cast<int32_t>(next());
    scratch = next();
    launches.resize(static_cast<size_t>(next()));
    for (Launch& launch : launches) {
      launch.function = reinterpret_cast<triton::Handle>(next());
      launch.x = small(), launch.y = small(), launch.z = small(), launch.threads = small(), launch.shared = small();
      launch.parameters.resize(static_cast<size_t>(next()));
      for (auto& [kind, value] : launch.parameters) {
        kind = next(), value = next();
        const bool inside = kind == kNumber || (value >= 0 && (kind == kTensor || (kind == kScratch && value < scratch)));
        if (!inside) throw std::invalid_argument("a parameter that is none");
        if (kind == kTensor) tensors = std::max(tensors, static_cast<uint64_t>(value) + 1);
      }
    }
  }

  // Make the launches on the current stream of the device. `addresses` are those of the tensors of this call.
  void run(const void* const* addresses) const {
    const Device place{aoti_torch_device_type_cuda(), device};
    const DeviceGuard guard(place);
    const Tensor memory = scratch > 0 ? workspace(scratch, place) : Tensor();
    const int64_t start = memory ? reinterpret_cast<int64_t>(memory.data()) : 0;
    const triton::Driver& driver = triton::Driver::get();
    triton::need_context(driver, device);
    void* const stream = current_stream(place);
    std::vector<int64_t> values;
    std::vector<void*> parameters;
    for (const Launch& launch : launches) {
      values.clear(), parameters.clear();
      values.reserve(launch.parameters.size());  // what points to a value stays right
      for (const auto& [kind, value] : launch.parameters) {
        values.push_back(kind == kNumber    ? value
                         : kind == kScratch ? start + value
                                            : reinterpret_cast<int64_t>(addresses[value]));
        parameters.push_back(&values.back());
      }
      driver.check(driver.launch(launch.function, launch.x, launch.y, launch.z, launch.threads, 1, 1, launch.shared, stream,
                                 parameters.data(), nullptr),
                   "cuLaunchKernel");
    }
  }
};

inline std::string& message() {
  thread_local std::string text;
  return text;
}

inline int replay(const void* recording, std::initializer_list<const void*> tensors) {
  try {
    const Recording& made = *static_cast<const Recording*>(recording);
    if (made.tensors > tensors.size()) throw std::invalid_argument("fewer tensors than were recorded");
    made.run(tensors.begin());
    return 0;
  } catch (const std::exception& why) {
    message() = why.what();
    return 1;
  }
}

}  // namespace shiplap::replay
