// Copies to, from and between discrete devices. What lies alike on both sides is copied as bytes in a
// stream; what changes its dtype or its strides goes by way of the host.
#include <ATen/ops/empty_strided.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <shiplap_backend/queues.h>

#include <algorithm>

namespace shiplap::backend {
namespace {

struct Extent {
  size_t begin, end;  // bytes of the storage
};

Extent extent_of(const at::Tensor& t) {
  auto size = t.itemsize();
  auto begin = static_cast<size_t>(t.storage_offset()) * size;
  if (t.numel() == 0) {
    return {begin, begin};
  }
  size_t last = 0;
  for (int64_t d = 0; d < t.dim(); ++d) {
    last += static_cast<size_t>((t.size(d) - 1) * t.stride(d));
  }
  return {begin, begin + (last + 1) * size};
}

char* bytes_of(const at::Tensor& t) {
  return static_cast<char*>(const_cast<void*>(t.storage().data())) + extent_of(t).begin;
}

// The same bytes mean the same values, and there are no others between them.
bool alike(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         a.strides() == b.strides() && a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg() &&
         a.is_non_overlapping_and_dense();
}

// Between two devices each waits for the other: the source may be in the making, and the target in use.
void between_devices(const at::Tensor& from, const at::Tensor& to, size_t size) {
  auto source = current_queue(from.device().index()), target = current_queue(to.device().index());
  auto order = [](Queue first, Queue then) {
    auto* mark = driver().mark(first);
    driver().block(then, mark);
    driver().drop(mark);
  };
  order(target, source);
  driver().copy(source, bytes_of(to), bytes_of(from), size);
  order(source, target);
}

void copy_bytes(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const auto [begin, end] = extent_of(from);
  const auto size = end - begin;
  if (size == 0) {
    return;
  }
  raise_failure();
  if (on_device(from) && on_device(to)) {
    if (from.device() == to.device()) {
      driver().copy(current_queue(from.device().index()), bytes_of(to), bytes_of(from), size);
    } else {
      between_devices(from, to, size);
    }
    return;
  }
  const auto& host = on_device(from) ? to : from;
  auto queue = current_queue((on_device(from) ? from : to).device().index());
  driver().copy(queue, bytes_of(to), bytes_of(from), size);
  if (non_blocking && is_pinned(host.storage().data())) {
    use_pinned(host.storage().data(), queue);
  } else {
    wait_for(queue);
  }
}

// New host memory in which `values` lie as in `like`.
at::Tensor laid_out(const at::Tensor& values, const at::Tensor& like) {
  auto t = at::empty_strided(like.sizes(), like.strides(), like.options().device(c10::kCPU));
  auto plain = over(like, t.storage(), c10::DispatchKey::CPU);  // with conjugate and negative bits
  plain.unsafeGetTensorImpl()->set_storage_offset(0);
  plain.copy_(values);
  return plain;
}

}  // namespace

c10::Storage host_storage(const c10::Storage& storage) {
  return {c10::Storage::use_byte_size_t(), storage.nbytes(), c10::GetCPUAllocator(),
          /*resizable=*/true};
}

c10::Storage device_storage(const c10::Storage& host) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), host.nbytes(), device_allocator(),
                       /*resizable=*/true);
  if (host.nbytes() > 0) {
    auto queue = current_queue(current_index());
    driver().copy(queue, storage.mutable_data(), host.data(), host.nbytes());
    wait_for(queue);
  }
  return storage;
}

void read_extent(const at::Tensor& t, void* host) {
  const auto [begin, end] = extent_of(t);
  if (begin < end) {
    auto queue = current_queue(t.device().index());
    driver().copy(queue, static_cast<char*>(host) + begin, bytes_of(t), end - begin);
    wait_for(queue);
  }
}

void write_extent(const at::Tensor& t, const void* host) {
  const auto [begin, end] = extent_of(t);
  if (begin < end) {
    auto queue = current_queue(t.device().index());
    driver().copy(queue, bytes_of(t), static_cast<const char*>(host) + begin, end - begin);
    wait_for(queue);
  }
}

void upload(void* to, const void* from, size_t bytes) {
  auto staged = pinned_allocator()->allocate(bytes);
  std::memcpy(staged.get(), from, bytes);
  auto queue = current_queue(current_index());
  driver().copy(queue, to, staged.get(), bytes);
  use_pinned(staged.get(), queue);
}

void copy(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  auto same = from.sizes() == to.sizes() ? from : from.expand_as(to);
  if (same.is_same(to) || to.numel() == 0) {
    return;
  }
  if (alike(same, to)) {
    copy_bytes(same, to, non_blocking);
  } else if (!on_device(to)) {
    to.copy_(host_view(same));
  } else if (to.is_non_overlapping_and_dense()) {
    copy_bytes(laid_out(host_view(same), to), to, false);
  } else {
    auto host = host_view(to);
    host.copy_(host_view(same));
    write_back(host, to);
  }
}

}  // namespace shiplap::backend
