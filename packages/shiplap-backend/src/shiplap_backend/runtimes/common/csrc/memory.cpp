// What both kinds of memory have in common: tensors of one side over the memory of the other.
#include <shiplap_backend/memory.h>

namespace shiplap::backend {

void check_index(c10::DeviceIndex index) {
  TORCH_CHECK(index >= -1 && index < device_count(), "device index ", static_cast<int>(index),
              " is out of range: there ", device_count() == 1 ? "is 1 device, index 0" : "are ",
              device_count() == 1 ? "" : std::to_string(device_count()) + " devices, from index 0");
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
  TORCH_CHECK_NOT_IMPLEMENTED(
      t.layout() == at::kStrided && t.has_storage(), "a ", t.layout(), " tensor of device '",
      kDeviceType, "' has no memory of its own to read: only strided tensors are supported");
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
