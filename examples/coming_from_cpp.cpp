// What a library has before it moves to a declaration: a function of at::Tensor,
// registered in two ways. coming_from_cpp.py compiles this file, and takes both over.
#include <torch/extension.h>

at::Tensor doubled(const at::Tensor& x) {
  TORCH_CHECK(x.dim() == 1 && x.scalar_type() == at::kFloat, "a vector of float32");
  return x * 2;
}

// --8<-- [start:register]
TORCH_LIBRARY(before_cpp, m) { m.def("doubled(Tensor x) -> Tensor"); }
TORCH_LIBRARY_IMPL(before_cpp, CPU, m) { m.impl("doubled", &doubled); }
// or, with pybind11:
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("doubled", &doubled); }
// --8<-- [end:register]
