// The ops of the device core: they make, reshape and copy tensors and compute nothing.
#include <ATen/EmptyTensor.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <shiplap_backend/memory.h>
#include <torch/library.h>

namespace shiplap::backend {
namespace {

using at::Tensor;

void check_options(std::optional<at::Layout> layout, std::optional<at::Device> device,
                   std::optional<bool> pinned) {
  TORCH_CHECK_NOT_IMPLEMENTED(!layout || *layout == at::kStrided, "layout ", *layout,
                              " is not supported on device '", kDeviceType, "', only strided");
  TORCH_CHECK(!device || device->index() <= 0, "device index ", static_cast<int>(device->index()),
              " is out of range: there is 1 device, index 0");
  TORCH_CHECK(!pinned || !*pinned, "Only dense CPU tensors can be pinned");
}

Tensor filled_if_deterministic(Tensor t) {
  if (at::globalContext().deterministicAlgorithms() &&
      at::globalContext().deterministicFillUninitializedMemory()) {
    auto host = host_view(t);
    at::native::fill_empty_deterministic_(host);
  }
  return t;
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
             std::optional<at::Layout> layout, std::optional<at::Device> device,
             std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  check_options(layout, device, pinned);
  auto scalar_type = at::dtype_or_default(dtype);
  return filled_if_deterministic(at::detail::empty_generic(
      size, device_allocator(), c10::DispatchKeySet(kKey), scalar_type, format));
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                     std::optional<at::Device> device, std::optional<bool> pinned) {
  check_options(layout, device, pinned);
  auto scalar_type = at::dtype_or_default(dtype);
  return filled_if_deterministic(at::detail::empty_strided_generic(
      size, stride, device_allocator(), c10::DispatchKeySet(kKey), scalar_type));
}

// torch's own CPU copy knows every dtype, stride, broadcast and conjugate; one of the two is on the
// device.
Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  host_view(dst).copy_(host_view(self), non_blocking);
  return dst;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}

at::Scalar local_scalar(const Tensor& self) { return at::_local_scalar_dense(host_view(self)); }

Tensor& set_nothing(Tensor& self) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, device_allocator(), /*resizable=*/true);
  return at::native::set_storage_cpu_(self, storage, 0, {0}, {});
}

Tensor& set_storage(Tensor& self, at::Storage source) {
  auto count = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return at::native::set_storage_cpu_(self, std::move(source), 0, {count}, {});
}

// Whether `self` may become a name of what `from` holds, as `param.data = param.data.to(device)` makes it.
// torch answers no for a device that it does not know, and Module.to would replace every Parameter:
// tied weights would come apart, and an optimiser would keep the old ones.
bool same_kind(const Tensor& self, const Tensor& from) {
  auto dense = [](const Tensor& t) {
    return t.layout() == at::kStrided && (t.device().is_cpu() || on_device(t));
  };
  return self.key_set() == from.key_set() || (dense(self) && dense(from));
}

void record_stream(Tensor&, c10::Stream) {}  // memory is free for reuse when an op has returned

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("resize_", TORCH_FN(at::native::resize_));
  m.impl("set_", TORCH_FN(set_nothing));
  m.impl("set_.source_Storage", TORCH_FN(set_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("_has_compatible_shallow_copy_type", TORCH_FN(same_kind));
}

// A copy resolves conjugates itself. Left to torch's fallback, that would clone the source, which
// is a copy again, without end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace
}  // namespace shiplap::backend
