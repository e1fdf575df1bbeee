// The device as the rest of the core needs it: its random numbers, its place in torch's autograd.
#pragma once

#include <ATen/core/Generator.h>
#if __has_include(<c10/core/DeviceCapability.h>)
#include <c10/core/DeviceCapability.h>
#endif

#include <optional>

namespace shiplap::backend {

// The CPU generator behind a device generator, behind the device's default one where none is given;
// a CPU generator as it is.
at::Generator host_generator(const std::optional<at::Generator>& generator);

// Gives autograd a thread for the device where it runs already. Once, when the device is registered.
void join_autograd();
// Returns when autograd's threads of the device have let go of all that past backwards used. Once,
// before Python ends, and without its lock.
void settle_autograd();

#if __has_include(<c10/core/DeviceCapability.h>)
// The dtypes of tensors that the device holds; operators that its library lacks run on the CPU.
inline c10::DeviceCapability capability() {
  c10::DeviceCapability all;
  auto& types = all.capability_data.supported_scalar_types;
  types.has_QInt8 = types.has_QUInt8 = types.has_QInt32 = types.has_QUInt4x2 = types.has_QUInt2x4 = 0;
  return all;
}
#endif

}  // namespace shiplap::backend
