// The ops of the device core: they make, reshape and copy tensors and compute nothing.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
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
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <shiplap_backend/memory.h>
#include <torch/library.h>

namespace shiplap::backend {
namespace {

using at::Tensor;

void check_options(std::optional<at::Layout> layout, std::optional<at::Device> device,
                   std::optional<bool> pinned) {
  TORCH_CHECK_NOT_IMPLEMENTED(!layout || *layout == at::kStrided, "layout ", *layout,
                              " is not supported on device '", kDeviceType, "', only strided");
  check_index(device ? device->index() : c10::DeviceIndex(-1));
  TORCH_CHECK(!pinned || !*pinned, "Only dense CPU tensors can be pinned");
}

// Enlarges the storage of `t`, which has `bytes`, to what its sizes and strides reach.
void hold(const Tensor& t, size_t bytes) {
  auto needed = at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.itemsize(),
                                                 static_cast<size_t>(t.storage_offset()));
  if (t.numel() > 0 && needed > bytes) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(t.storage(), needed);
  }
}

Tensor filled_if_deterministic(Tensor t) {
  if (at::globalContext().deterministicAlgorithms() &&
      at::globalContext().deterministicFillUninitializedMemory()) {
    auto host = host_view(t);
    at::native::fill_empty_deterministic_(host);
    write_back(host, t);
  }
  return t;
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
             std::optional<at::Layout> layout, std::optional<at::Device> device,
             std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  check_options(layout, device, pinned);
  auto scalar_type = at::dtype_or_default(dtype);
  const c10::DeviceGuard guard(device.value_or(current_device()));
  return filled_if_deterministic(at::detail::empty_generic(
      size, device_allocator(), c10::DispatchKeySet(kKey), scalar_type, format));
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                     std::optional<at::Device> device, std::optional<bool> pinned) {
  check_options(layout, device, pinned);
  auto scalar_type = at::dtype_or_default(dtype);
  const c10::DeviceGuard guard(device.value_or(current_device()));
  return filled_if_deterministic(at::detail::empty_strided_generic(
      size, stride, device_allocator(), c10::DispatchKeySet(kKey), scalar_type));
}

Tensor efficient_zeros(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                       std::optional<at::Layout> layout, std::optional<at::Device> device,
                       std::optional<bool> pinned) {
  check_options(layout, device, pinned);
  const c10::DeviceGuard guard(device.value_or(current_device()));
  return zero_tensor(size, at::TensorOptions(current_device()).dtype(at::dtype_or_default(dtype)));
}

// One of the two is on the device. A zero tensor has no memory to copy.
Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  if (self._is_zerotensor()) {
    return dst.zero_();
  }
  check_strided(self);
  check_strided(dst);
  copy(self, dst, non_blocking);
  return dst;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}

at::Scalar local_scalar(const Tensor& self) { return at::_local_scalar_dense(host_view(self)); }

// As torch's for the CPU, which would read the memory that it enlarges.
const Tensor& resize(const Tensor& self, at::IntArrayRef size,
                     std::optional<at::MemoryFormat> format) {
  if constexpr (!kDiscrete) {
    return at::native::resize_(self, size, format);
  }
  auto* impl = self.unsafeGetTensorImpl();
  auto before = self.storage().nbytes();
  if (self.sizes() != size) {
    impl->set_sizes_contiguous(size);
    hold(self, before);
  }
  if (format) {
    TORCH_CHECK(*format != at::MemoryFormat::Preserve, "Unsupported memory format ", *format);
    impl->empty_tensor_restride(*format);
  }
  return before < self.storage().nbytes() ? filled_if_deterministic(self), self : self;
}

Tensor& set_storage_at(Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                       at::IntArrayRef stride) {
  if constexpr (!kDiscrete) {
    return at::native::set_storage_cpu_(self, source, offset, size, stride);
  }
  at::native::checkSetStorage(self, source, offset, size, stride);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  if (stride.data() != nullptr) {
    impl->set_sizes_and_strides(size, stride);
  } else {
    impl->set_sizes_contiguous(size);
  }
  hold(self, source.nbytes());
  return self;
}

Tensor& set_nothing(Tensor& self) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, device_allocator(), /*resizable=*/true);
  return set_storage_at(self, storage, 0, {0}, {});
}

Tensor& set_storage(Tensor& self, at::Storage source) {
  auto count = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage_at(self, std::move(source), 0, {count}, {});
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

void record_stream(Tensor& self, c10::Stream stream) {
  c10::getDeviceAllocator(kDeviceType)->recordStream(self.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("_efficientzerotensor", TORCH_FN(efficient_zeros));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("resize_", TORCH_FN(resize));
  m.impl("set_", TORCH_FN(set_nothing));
  m.impl("set_.source_Storage", TORCH_FN(set_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage_at));
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
TORCH_LIBRARY_IMPL(aten, ZeroTensor, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace
}  // namespace shiplap::backend
