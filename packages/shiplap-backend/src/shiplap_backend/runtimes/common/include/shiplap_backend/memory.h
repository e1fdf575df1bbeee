// Memory of the device: host memory that both torch's CPU kernels and the vendor's library can
// address.
//
// Because the memory is the host's, a CPU tensor and a device tensor can stand on the same bytes:
// `host_view` and `adopt` are all there is to copies, to the CPU fallback and to the scalars that
// Python asks for. Nothing is copied by them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

namespace shiplap::backend {

inline constexpr c10::DeviceType kDeviceType = c10::DeviceType::PrivateUse1;
inline constexpr c10::DispatchKey kKey = c10::DispatchKey::PrivateUse1;
inline const c10::Device kDevice(kDeviceType, 0);  // the only one

struct MemoryStats {
  int64_t allocated, peak, limit /* 0: none */, allocations /* so far */;
};

MemoryStats memory_stats();
void reset_peak_memory();
void set_memory_limit(int64_t bytes);

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* data);

inline bool on_device(const at::Tensor& t) {
  return t.defined() && t.device().type() == kDeviceType;
}

// Storage on the same bytes as `storage`, which it keeps alive.
c10::Storage host_storage(const c10::Storage& storage);
c10::Storage device_storage(const c10::Storage& host);

// A CPU tensor on the memory of a device tensor: sizes, strides, conjugate and negative bits as
// they are. A tensor of another device is returned as it is.
at::Tensor host_view(const at::Tensor& t);

// The same geometry over another storage of the same bytes.
at::Tensor over(const at::Tensor& like, c10::Storage storage, c10::DispatchKey key);

}  // namespace shiplap::backend
