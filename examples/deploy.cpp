// A program without Python: loads the ops and a model that AOTInductor has packaged, and runs it.
//   deploy deployed/libshiplap_ops.so model.pt2
#include <dlfcn.h>
#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdio>

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  if (dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL) == nullptr) return std::fprintf(stderr, "%s\n", dlerror()), 1;
  torch::inductor::AOTIModelPackageLoader model(argv[2]);
  const at::Tensor x = at::arange(6, at::kFloat);
  const at::Tensor y = model.run({x}).at(0);
  std::printf("%s\n", at::equal(y, x + 1) ? "equal" : "different");
  return at::equal(y, x + 1) ? 0 : 1;
}
