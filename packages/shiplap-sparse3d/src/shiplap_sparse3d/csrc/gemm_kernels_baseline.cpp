// Any machine: 16-byte vectors (SSE2 on x86-64, NEON on AArch64).
#define SHIPLAP_VECTOR_BYTES 16
#define SHIPLAP_REGISTERS 16
#include "gemm_kernels_impl.h"

namespace shiplap::sparse3d {
const IsaKernels& baseline_kernels() { return kKernels; }
}  // namespace shiplap::sparse3d
