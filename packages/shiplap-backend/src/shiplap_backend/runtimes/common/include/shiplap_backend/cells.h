// Operators that torch asks of an accelerator and the CPU lacks, made of other operators of the device.
#pragma once

#include <torch/library.h>

#include <functional>

namespace shiplap::backend {

// Hands each such operator, by its full name, to `offer`, which registers it where the target has none.
void register_cells(const std::function<void(const char*, torch::CppFunction)>& offer);
void register_attention(const std::function<void(const char*, torch::CppFunction)>& offer);

}  // namespace shiplap::backend
