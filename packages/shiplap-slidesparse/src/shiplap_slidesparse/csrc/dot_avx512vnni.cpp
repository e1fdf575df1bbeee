#define SHIPLAP_VECTOR_BYTES 64
#include "dot_impl.h"

namespace shiplap::slidesparse {
const Kernels& avx512vnni_kernels() { return kKernels; }
}  // namespace shiplap::slidesparse
