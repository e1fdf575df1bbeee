// x86-64 with AVX-512F; compiled with -mavx512f -mfma -mprefer-vector-width=512.
#define SHIPLAP_VECTOR_BYTES 64
#define SHIPLAP_REGISTERS 32
#include "gemm_kernels_impl.h"

namespace shiplap::sparse3d {
const IsaKernels& avx512_kernels() { return kKernels; }
}  // namespace shiplap::sparse3d
