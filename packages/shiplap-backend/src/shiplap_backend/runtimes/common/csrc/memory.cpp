// What both kinds of memory have in common: tensors of one side over the memory of the other.
#include <ATen/EmptyTensor.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/zeros.h>
#include <shiplap_backend/memory.h>

namespace shiplap::backend {

void check_index(c10::DeviceIndex index) {
  TORCH_CHECK(index >= -1 && index < device_count(), "device index ", static_cast<int>(index),
              " is out of range: there ", device_count() == 1 ? "is 1 device, index 0" : "are ",
              device_count() == 1 ? "" : std::to_string(device_count()) + " devices, from index 0");
}

void check_strided(const at::Tensor& t) {
  const char* kind = t.is_quantized()             ? "a quantized tensor"
                     : t.is_nested()              ? "a nested tensor"
                     : t.layout() != at::kStrided ? "a sparse tensor"
                     : !t.has_storage() || (t.numel() > 0 && t.storage().data() == nullptr)
                         ? "a tensor without memory of its own"
                                                  : nullptr;
  TORCH_CHECK_NOT_IMPLEMENTED(kind == nullptr, "device '", kDeviceType,
                              "' holds strided tensors\n  got      ", kind, ", layout ", t.layout(),
                              "\n  fix      compute with it on the CPU, or make it a strided tensor first");
}

void devices_differ(const std::string& op, const std::string& name, c10::Device here,
                    c10::Device there) {
  const std::string where = name.empty() ? "" : "when checking argument for argument " + name + " ";
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ",
              here, " and ", there, "! (", where, "in method ", op, ")");
}

at::Tensor zero_tensor(at::IntArrayRef sizes, const at::TensorOptions& options) {
  at::native::ZeroTensorAllocator nothing(options.device());
  auto keys = c10::DispatchKeySet(kKey) | c10::DispatchKeySet(c10::DispatchKey::ZeroTensor);
  return at::detail::empty_generic(sizes, &nothing, keys, c10::typeMetaToScalarType(options.dtype()),
                                   std::nullopt);
}

at::Tensor over(const at::Tensor& like, c10::Storage storage, c10::DispatchKey key) {
  auto t = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key),
                                                    like.dtype());
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) {
    impl->set_wrapped_number(true);
  }
  if (like.is_conj()) {
    impl->_set_conj(true);
  }
  if (like.is_neg()) {
    impl->_set_neg(true);
  }
  return t;
}

at::Tensor host_view(const at::Tensor& t) {
  if (!on_device(t)) {
    return t;
  }
  if (t._is_zerotensor()) {
    return at::zeros({}, t.options().device(c10::kCPU)).expand(t.sizes());
  }
  check_strided(t);
  auto host = over(t, host_storage(t.storage()), c10::DispatchKey::CPU);
  read_extent(t, host.storage().mutable_data());
  return host;
}

void write_back(const at::Tensor& host, const at::Tensor& t) {
  if (on_device(t)) {
    write_extent(t, host.storage().data());
  }
}

}  // namespace shiplap::backend
