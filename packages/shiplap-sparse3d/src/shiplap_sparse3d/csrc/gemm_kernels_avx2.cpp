// x86-64 with AVX2, FMA and F16C; compiled with -mavx2 -mfma -mf16c.
#define SHIPLAP_VECTOR_BYTES 32
#define SHIPLAP_REGISTERS 16
#include "gemm_kernels_impl.h"

namespace shiplap::sparse3d {
const IsaKernels& avx2_kernels() { return kKernels; }
}  // namespace shiplap::sparse3d
