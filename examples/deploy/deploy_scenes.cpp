// A program without Python: loads a network that builds its own tables, which package_model has made, and runs it over
// scenes that Python has saved, beside what they gave there.
//   deploy_scenes model.pt2 scenes.pt cuda
#include <ATen/ATen.h>
#include <torch/csrc/api/include/torch/serialize.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <vector>

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  torch::inductor::AOTIModelPackageLoader model(argv[1]);
  std::ifstream file(argv[2], std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  const at::Device device(argv[3]);
  const c10::IValue scenes = torch::pickle_load(bytes);
  int different = 0;
  for (const c10::IValue& scene : scenes.toListRef()) {
    const auto& tensors = scene.toTupleRef().elements();
    std::vector<at::Tensor> inputs;
    for (size_t i = 0; i + 1 < tensors.size(); ++i) inputs.push_back(tensors[i].toTensor().to(device));
    const at::Tensor want = tensors.back().toTensor(), got = model.run(inputs).at(0).cpu();
    const double off = want.numel() ? (got - want).abs().max().item<double>() : 0.0;
    std::printf("%lld rows, %.1e off\n", static_cast<long long>(want.size(0)), off);
    different += !at::allclose(got, want, 1e-3, 1e-3);
  }
  std::printf("%s\n", different ? "different" : "equal");
  return different != 0;
}
