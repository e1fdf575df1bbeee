#define SHIPLAP_VECTOR_BYTES 32
#include "dot_impl.h"

namespace shiplap::slidesparse {
const Kernels& avx2_kernels() { return kKernels; }
}  // namespace shiplap::slidesparse
