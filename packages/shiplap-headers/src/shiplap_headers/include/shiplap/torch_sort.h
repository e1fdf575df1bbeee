// A sort by torch of integers in a workspace, for programs of launches: torch's stable C ABI, no ATen headers.
#pragma once

#include "shiplap/native_tensor.h"

namespace shiplap {

// Memory that a workspace has, as a tensor that owns nothing.
inline AtenTensorHandle part_of(const sl_context* context, DLDevice device, int64_t offset, int64_t count, int64_t bits) {
  const uint64_t bytes = static_cast<uint64_t>(mul(count, bits / 8));
  if (offset < 0 || static_cast<uint64_t>(offset) + bytes > context->workspace_size) {
    throw std::runtime_error("a sort of " + std::to_string(count) + " integers beyond a workspace of " +
                             std::to_string(context->workspace_size) + " bytes");
  }
  const int32_t type = device.device_type == 2 ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu();
  const int32_t dtype = bits == 16   ? aoti_torch_dtype_int16()
                        : bits == 32 ? aoti_torch_dtype_int32()
                                     : aoti_torch_dtype_int64();
  const int64_t stride = 1;
  AtenTensorHandle made = nullptr;
  check(aoti_torch_create_tensor_from_blob(static_cast<char*>(context->workspace) + offset, 1, &count, &stride, 0, dtype, type,
                                           type == aoti_torch_device_type_cuda() ? device.device_id : 0, &made), "view");
  return made;
}

// Another handle of a tensor, for a callee that takes the one it is given.
inline AtenTensorHandle lent(const Tensor& tensor) {
  AtenTensorHandle other = nullptr;
  check(aoti_torch_new_tensor_handle(tensor.get(), &other), "handle");
  return other;
}

// A stable ascending sort of `count` integers of `bits`; where each one was goes to `rows`, as int64. Offsets in bytes.
//
// The tensors stay owned here until the end. Torch 2.11 (2.13 does not) drops the arguments of a boxed call before it
// reads the references to them that an operator with several outputs returns: whoever gave the last handle away gets a
// freed tensor back, which damages the heap.
inline void sort_in_workspace(const sl_context* context, DLDevice device, int64_t bits, int64_t count, int64_t keys,
                              int64_t values, int64_t rows) {
  if (count <= 0) return;
  const Tensor from_keys(part_of(context, device, keys, count, bits));
  const Tensor to_values(part_of(context, device, values, count, bits)), to_rows(part_of(context, device, rows, count, 64));
  StableIValue stack[] = {torch::stable::detail::from(lent(from_keys)), torch::stable::detail::from(std::optional<bool>(true)),
                          torch::stable::detail::from(int64_t{0}), torch::stable::detail::from(false),
                          torch::stable::detail::from(lent(to_values)), torch::stable::detail::from(lent(to_rows))};
  check(torch_call_dispatcher("aten::sort", "values_stable", stack, TORCH_ABI_VERSION), "sort");
  const Tensor sorted(to<AtenTensorHandle>(stack[0])), order(to<AtenTensorHandle>(stack[1]));
}

}  // namespace shiplap
