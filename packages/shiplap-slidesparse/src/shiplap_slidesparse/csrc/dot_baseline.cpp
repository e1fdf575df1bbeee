#define SHIPLAP_VECTOR_BYTES 16
#include "dot_impl.h"

namespace shiplap::slidesparse {
const Kernels& baseline_kernels() { return kKernels; }
}  // namespace shiplap::slidesparse
