// The arguments of one call of the CPU fallback, on the host.
#pragma once

#include <ATen/native/nested/NestedTensorUtils.h>
#include <shiplap_backend/memory.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

namespace shiplap::backend {

// The device tensors of one call and their host views; tensors that share storage share it on the
// host too.
class Host {
 public:
  // `written`: the schema says so. An op may write an argument that its schema does not name, such as
  // the running mean of a batch norm: `settle` looks.
  at::Tensor view(const at::Tensor& t, bool written) {
    if (!on_device(t)) {
      return t;
    }
    for (auto& argument : tensors_) {
      if (argument.device.is_same(t)) {
        argument.written |= written;
        return argument.host;
      }
    }
    if (t._is_zerotensor()) {  // there is no memory: what the host reads is made here
      TORCH_CHECK(!written, "ZeroTensors are immutable. Please use the materialized zero tensor ",
                  "obtained using .clone() if you want a mutable tensor.");
      return host_view(t);
    }
    if (t.is_nested()) {
      for (const auto& [device, host] : nested_) {
        if (device.is_same(t)) {
          return host;
        }
      }
      auto host = nested_over(view(at::native::get_buffer(t), written), t);
      nested_.emplace_back(t, host);
      return host;
    }
    check_strided(t);
    auto storage = storage_of(t);
    tensors_.push_back({t, over(t, storage, c10::DispatchKey::CPU), written, 0});
    read_extent(t, storage.mutable_data());
    return tensors_.back().host;
  }

  // All arguments are there. Discrete memory only: what they hold before the op.
  void ready() {
    for (auto& argument : tensors_) {
      argument.before = kDiscrete && !argument.written ? digest(argument.host) : 0;
    }
  }

  // The device's counterpart of what the CPU op returned: an argument, a view of one, or a new
  // tensor on the new memory.
  at::Tensor back(const at::Tensor& t) {
    if (!t.defined()) {
      return t;
    }
    for (const auto& argument : tensors_) {
      if (argument.host.is_same(t)) {
        return argument.device;
      }
    }
    for (const auto& [device, host] : nested_) {
      if (host.is_same(t)) {
        return device;
      }
    }
    if (t._is_zerotensor()) {
      return zero_tensor(t.sizes(), t.options().device(current_device()));
    }
    if (t.is_nested()) {
      return nested_over(back(at::native::get_buffer(t)), t);
    }
    check_strided(t);
    TORCH_CHECK_NOT_IMPLEMENTED(t.device().is_cpu(), "the result is on ", t.device(),
                                ", which this device cannot hold");
    for (const auto& s : storages_) {
      if (s.host.is_alias_of(t.storage())) {
        return over(t, s.device, kKey);
      }
    }
    storages_.push_back({device_storage(t.storage()), t.storage(), nullptr, false});
    return over(t, storages_.back().device, kKey);
  }

  // What the CPU op did to an argument beyond its values: new sizes, and new memory if those were
  // too large for the old.
  void settle() {
    for (auto& s : storages_) {
      if (s.argument) {
        grow(s);
      }
    }
    for (const auto& [device, host, written, before] : tensors_) {
      if (device.sizes() != host.sizes() || device.strides() != host.strides() ||
          device.storage_offset() != host.storage_offset()) {
        device.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(),
                                                            host.storage_offset());
      }
      if (kDiscrete && (written || digest(host) != before)) {
        write_extent(device, host.storage().data());
      }
    }
  }

 private:
  struct Argument {
    at::Tensor device, host;
    bool written;
    uint64_t before;
  };
  struct Pair {
    c10::Storage device, host;
    const void* data;  // of the host's, before the op
    bool argument;
  };

  // The nested tensor `like` over another buffer; its sizes, strides and offsets are on the CPU.
  static at::Tensor nested_over(const at::Tensor& buffer, const at::Tensor& like) {
    const auto* impl = at::native::get_nested_tensor_impl(like);
    return at::native::wrap_buffer(buffer, impl->get_nested_sizes(), impl->get_nested_strides(),
                                   impl->get_storage_offsets());
  }

  c10::Storage storage_of(const at::Tensor& t) {
    for (const auto& s : storages_) {
      if (s.device.is_alias_of(t.storage())) {
        return s.host;
      }
    }
    auto host = host_storage(t.storage());
    storages_.push_back({t.storage(), host, host.data(), true});
    return host;
  }

  // Of the bytes between the first element and the last.
  static uint64_t digest(const at::Tensor& t) {
    size_t last = t.numel() > 0 ? 1 : 0;
    for (int64_t d = 0; t.numel() > 0 && d < t.dim(); ++d) {
      last += static_cast<size_t>((t.size(d) - 1) * t.stride(d));
    }
    const auto* bytes = static_cast<const char*>(t.const_data_ptr());
    const auto size = last * t.itemsize();
    uint64_t sum = size;
    for (size_t i = 0; i < size; i += sizeof sum) {
      uint64_t word = 0;
      std::memcpy(&word, bytes + i, std::min(sizeof word, size - i));
      sum = (sum ^ word) * 0x9E3779B97F4A7C15ull;
      sum ^= sum >> 29;
    }
    return sum;
  }

  static void grow(Pair& s) {
    if (s.host.data() == s.data && s.host.nbytes() == s.device.nbytes()) {
      return;
    }
    auto grown = device_storage(s.host);
    auto* impl = s.device.unsafeGetStorageImpl();
    auto bytes = grown.nbytes();
    impl->set_data_ptr_noswap(grown.unsafeGetStorageImpl()->set_data_ptr(c10::DataPtr()));
    impl->set_nbytes(bytes);
  }

  std::vector<std::pair<at::Tensor, at::Tensor>> nested_;  // of the device, and of the host
  c10::SmallVector<Argument, 6> tensors_;
  c10::SmallVector<Pair, 6> storages_;
};

}  // namespace shiplap::backend
