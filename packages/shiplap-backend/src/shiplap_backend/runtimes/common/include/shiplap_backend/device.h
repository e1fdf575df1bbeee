// The device as the rest of the core needs it: its random numbers, its place in torch's autograd.
#pragma once

#include <ATen/core/Generator.h>

#include <optional>

namespace shiplap::backend {

// The CPU generator behind a device generator, behind the device's default one where none is given;
// a CPU generator as it is.
at::Generator host_generator(const std::optional<at::Generator>& generator);

// Gives autograd a thread for the device where it runs already. Once, when the device is registered.
void join_autograd();

}  // namespace shiplap::backend
