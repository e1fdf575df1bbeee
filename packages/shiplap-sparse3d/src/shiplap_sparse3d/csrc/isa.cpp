// Which instruction sets this machine can run. Reads the CPU's features on every call (a few
// nanoseconds): a remembered result would be state. CMakeLists.txt defines SHIPLAP_HAS_<ISA> for
// each instruction set whose kernels are in the library.
#include "gemm_kernels.h"
#include "shiplap/cpu/cpuid.h"

namespace shiplap::sparse3d {

const IsaKernels* isa_kernels(int32_t isa) {
  switch (isa) {
    case kBaseline:
      return &baseline_kernels();
#if defined(SHIPLAP_HAS_AVX2)
    case kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()
                 ? &avx2_kernels()
                 : nullptr;
#endif
#if defined(SHIPLAP_HAS_AVX512)
    case kAvx512:
      return __builtin_cpu_supports("avx512f") ? &avx512_kernels() : nullptr;
#endif
#if defined(SHIPLAP_HAS_AVX512BF16)
    case kAvx512Bf16:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bf16")
                 ? &avx512bf16_kernels()
                 : nullptr;
#endif
    default:
      return nullptr;
  }
}

const IsaKernels& best_kernels() {
  for (int32_t isa = kIsaCount - 1; isa > kBaseline; --isa) {
    if (const IsaKernels* kernels = isa_kernels(isa)) return *kernels;
  }
  return baseline_kernels();
}

}  // namespace shiplap::sparse3d
