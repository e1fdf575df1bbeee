// Which instruction sets this machine can run. Asks the CPU on every call (a few nanoseconds): a remembered answer would
// be state.
#include "dot.h"

#include "shiplap/cpu/cpuid.h"

namespace shiplap::slidesparse {

const Kernels* isa_kernels(int32_t isa) {
  switch (isa) {
    case kBaseline:
      return &baseline_kernels();
#if defined(__x86_64__)
    case kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c() ? &avx2_kernels() : nullptr;
    case kAvx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") ? &avx512_kernels() : nullptr;
    case kAvx512Vnni:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512vnni")
                 ? &avx512vnni_kernels()
                 : nullptr;
#endif
    default:
      return nullptr;
  }
}

const Kernels& best_kernels() {
  for (int32_t isa = kIsaCount - 1; isa > kBaseline; --isa) {
    if (const Kernels* kernels = isa_kernels(isa)) return *kernels;
  }
  return baseline_kernels();
}

}  // namespace shiplap::slidesparse
