// A program without Python: loads a network that builds its own tables, which package_model has made, and runs it over
// scenes that Python has saved as (inputs, results), beside the results. A scene with a text in place of the results is
// wrong in the way that the text says: the network has to refuse it with an exception, and the program goes on.
//   deploy_scenes model.pt2 scenes.pt cuda 1e-3
#include <ATen/ATen.h>
#include <torch/csrc/api/include/torch/serialize.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iterator>
#include <vector>

namespace {

std::vector<at::Tensor> tensors_on(const at::Device& device, const c10::IValue& held) {
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& each : held.toTupleRef().elements()) tensors.push_back(each.toTensor().to(device));
  return tensors;
}

// The largest difference between two lists of tensors, or -1 where shapes, numbers or an element beyond `within` differ.
double difference(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& want, double within) {
  if (got.size() != want.size()) return -1;
  double most = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const at::Tensor a = got[i].cpu().to(at::kDouble), b = want[i].to(at::kDouble);
    if (a.sizes() != b.sizes() || got[i].scalar_type() != want[i].scalar_type()) return -1;
    if (!at::allclose(a, b, within, within)) return -1;
    if (b.numel()) most = std::max(most, (a - b).abs().max().item<double>());
  }
  return most;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  torch::inductor::AOTIModelPackageLoader model(argv[1]);
  std::ifstream file(argv[2], std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  const at::Device device(argv[3]), host(at::kCPU);
  const double within = argc > 4 ? std::atof(argv[4]) : 1e-5;
  const c10::IValue scenes = torch::pickle_load(bytes);
  int different = 0;
  for (const c10::IValue& scene : scenes.toListRef()) {
    const auto& parts = scene.toTupleRef().elements();
    const std::vector<at::Tensor> inputs = tensors_on(device, parts[0]);
    const long long rows = inputs.at(0).dim() ? inputs.at(0).size(0) : 1;
    if (parts[1].isString()) {
      bool refused = false;
      try {
        model.run(inputs);
      } catch (const std::exception&) {  // the reason is on stderr
        refused = true;
      }
      std::printf("%s: %s\n", parts[1].toStringRef().c_str(), refused ? "refused" : "not refused");
      different += !refused;
      continue;
    }
    const double off = difference(model.run(inputs), tensors_on(host, parts[1]), within);
    std::printf("%lld rows, %.1e off\n", rows, off);
    different += off < 0;
  }
  std::printf("%s\n", different ? "different" : "equal");
  return different != 0;
}
