// Sorts in a workspace, with a dispatcher that does what torch 2.11's does: it lets go of the tensors it was given before
// it looks at them once more. Says "sorted", or how many of them were freed by then.
#include <cstdio>
#include <cstdlib>

#include "shiplap/torch_sort.h"

static int large = 0;  // blocks of the size of a tensor that were freed
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t size) noexcept {
  large += size >= 100;
  std::free(memory);
}

static int freed = 0, calls = 0;

extern "C" AOTITorchError torch_call_dispatcher(const char* name, const char* overload, StableIValue* stack, uint64_t) {
  const bool known = std::string(name) == "aten::sort" && std::string(overload) == "values_stable";
  delete reinterpret_cast<StableIValue*>(stack[1]);  // of the optional
  int64_t count = 0;
  AtenTensorHandle given[3], made[2];
  int64_t* sizes = nullptr;
  for (int i = 0; i < 3; ++i) given[i] = shiplap::to<AtenTensorHandle>(stack[i == 0 ? 0 : i + 3]);
  if (aoti_torch_get_sizes(given[0], &sizes) != AOTI_TORCH_SUCCESS) return 1;
  count = *sizes;
  const int before = large;
  for (AtenTensorHandle each : given) aoti_torch_delete_tensor_object(each);
  freed += large - before;
  const int64_t stride = 1;
  static int64_t memory[1 << 10];
  for (AtenTensorHandle& each : made) {
    if (aoti_torch_create_tensor_from_blob(memory, 1, &count, &stride, 0, aoti_torch_dtype_int64(), aoti_torch_device_type_cpu(),
                                           0, &each) != AOTI_TORCH_SUCCESS) return 1;
  }
  for (int i = 0; i < 2; ++i) stack[i] = torch::stable::detail::from(made[i]);
  ++calls;
  return known ? AOTI_TORCH_SUCCESS : 1;
}

int main() {
  constexpr int64_t kCount = 100;
  static int64_t workspace[3 * kCount];
  char message[1024] = "";
  const sl_context context{SL_ABI_VERSION, 1, nullptr, workspace, sizeof workspace, message, sizeof message, nullptr, 0};
  for (int i = 0; i < 3; ++i) shiplap::sort_in_workspace(&context, DLDevice{1, 0}, 64, kCount, 0, 8 * kCount, 16 * kCount);
  if (freed == 0 && calls == 3) std::puts("sorted");
  else std::printf("%d tensors were freed in %d calls\n", freed, calls);
}
