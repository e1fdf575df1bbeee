// A program without Python: loads a model with its ops, which package_model has made,
// and runs it.
//   deploy model.pt2
#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdio>

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  torch::inductor::AOTIModelPackageLoader model(argv[1]);
  const at::Tensor x = at::arange(6, at::kFloat);
  const at::Tensor y = model.run({x}).at(0);
  std::printf("%s\n", at::equal(y, x + 1) ? "equal" : "different");
  return at::equal(y, x + 1) ? 0 : 1;
}
