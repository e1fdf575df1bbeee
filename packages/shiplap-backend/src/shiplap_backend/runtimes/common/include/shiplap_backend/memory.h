// Memory of the device. A runtime chooses one of two kinds when it is compiled.
//
// Shared: host memory that both torch's CPU kernels and the vendor's library can address. A CPU
// tensor and a device tensor stand on the same bytes, and `host_view` copies nothing.
//
// Discrete: memory that only the vendor's driver addresses (driver.h). `host_view` is a copy, and
// what the host computes is written back.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <string>
#include <utility>

#ifndef SHIPLAP_DISCRETE
#define SHIPLAP_DISCRETE 0  // a runtime with discrete=True says 1
#endif

namespace shiplap::backend {

inline constexpr bool kDiscrete = SHIPLAP_DISCRETE;
inline constexpr c10::DeviceType kDeviceType = c10::DeviceType::PrivateUse1;
inline constexpr c10::DispatchKey kKey = c10::DispatchKey::PrivateUse1;

c10::DeviceIndex device_count();
// The calling thread's.
c10::DeviceIndex current_index();
void set_current_index(c10::DeviceIndex index);
inline c10::Device current_device() { return {kDeviceType, current_index()}; }
// Throws for an index that no device has. -1 is the current one.
void check_index(c10::DeviceIndex index);

struct MemoryStats {
  int64_t allocated, peak, limit /* 0: none */, allocations /* so far */, reserved;
};

MemoryStats memory_stats(c10::DeviceIndex index);
void reset_peak_memory(c10::DeviceIndex index);
void set_memory_limit(c10::DeviceIndex index, int64_t bytes);
// Free and total bytes of the device, whatever the limit.
std::pair<size_t, size_t> memory_info(c10::DeviceIndex index);
void empty_cache();
// No op that this process put into a stream of the device is outstanding afterwards.
void synchronize(c10::DeviceIndex index);

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* data);

inline bool on_device(const at::Tensor& t) {
  return t.defined() && t.device().type() == kDeviceType;
}

// A host storage for the bytes of `storage`. Shared: on the same bytes, which it keeps alive.
// Discrete: new memory without values.
c10::Storage host_storage(const c10::Storage& storage);
// A storage of the current device with the bytes of `host`. Shared: on the same bytes.
c10::Storage device_storage(const c10::Storage& host);

// A CPU tensor with the values of a device tensor: sizes, strides, conjugate and negative bits as
// they are. A tensor of another device is returned as it is. Discrete: a copy, and the host waits.
at::Tensor host_view(const at::Tensor& t);
// What the host wrote to `host_view(t)` reaches the device. Shared: it did already.
void write_back(const at::Tensor& host, const at::Tensor& t);
// The bytes between the first and the last element of `t`, from the device to `host` and back.
void read_extent(const at::Tensor& t, void* host_storage);
void write_extent(const at::Tensor& t, const void* host_storage);
// Any strides and dtypes; one of the two is on the device.
void copy(const at::Tensor& from, const at::Tensor& to, bool non_blocking);
// `from` is host memory, which is read before the call returns.
void upload(void* to, const void* from, size_t bytes);

// Throws for a tensor that is more than strided memory, which another tensor on the same bytes would
// not be: sparse and quantized tensors, and subclasses that wrap other tensors.
void check_strided(const at::Tensor& t);
// Throws torch's error for tensors of two devices. `name` is that of the argument that is `there`.
[[noreturn]] void devices_differ(const std::string& op, const std::string& name, c10::Device here,
                                 c10::Device there);
// An efficient zero tensor: sizes, and no memory. torch's formulas for gradients make them.
at::Tensor zero_tensor(at::IntArrayRef sizes, const at::TensorOptions& options);

// The same geometry over another storage of the same bytes.
at::Tensor over(const at::Tensor& like, c10::Storage storage, c10::DispatchKey key);

// Notes that the vendor's threads run from now on: a fork of this process must not use the device.
void vendor_starts();

}  // namespace shiplap::backend
