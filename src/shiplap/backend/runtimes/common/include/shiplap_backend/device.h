// Random numbers of the device, for whoever runs an op on the CPU in its place.
#pragma once

#include <ATen/core/Generator.h>

#include <optional>

namespace shiplap::backend {

// The CPU generator behind a device generator, behind the device's default one where none is given;
// a CPU generator as it is.
at::Generator host_generator(const std::optional<at::Generator>& generator);

}  // namespace shiplap::backend
