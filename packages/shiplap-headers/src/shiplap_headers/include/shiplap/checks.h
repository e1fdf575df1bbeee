// What a generated binding asks of its tensors, and how it shows them to a kernel. It is included by a header that has
// defined `Tensor` and `dl_device`: native_tensor.h for torch's handles, tvm_ffi.h for DLPack views.
#pragma once

namespace shiplap {

// Fill `view` from `tensor`. A contiguous tensor gets the canonical strides, also in dims of size 0 or 1.
inline DLTensor* look(View& view, const Tensor& tensor) {
  const int64_t rank = tensor.dim();
  if (rank > kMaxRank) throw std::runtime_error("shiplap: more than 8 dims");
  std::copy_n(tensor.sizes(), rank, view.shape.begin());
  if (tensor.is_contiguous()) {
    fill_canonical(view.shape.data(), rank, view.strides.data());
  } else {
    std::copy_n(tensor.strides(), rank, view.strides.begin());
  }
  view.tensor = DLTensor{tensor.data(), {dl_device(tensor.device_type()), std::max(tensor.device_index(), 0)},
                         static_cast<int32_t>(rank), element_type(tensor.dtype()), view.shape.data(),
                         view.strides.data(), 0};
  return &view.tensor;
}

inline Device device_of(const Tensor& t) { return {t.device_type(), t.device_index()}; }

inline uintptr_t address(const Tensor& t) { return reinterpret_cast<uintptr_t>(t.data()); }

inline int64_t numel(const Tensor& t) {
  return std::accumulate(t.sizes(), t.sizes() + t.dim(), int64_t{1}, std::multiplies<int64_t>());
}

inline bool is_vector(const Tensor& t) { return t.dim() == 1 && t.strides()[0] == 1; }

inline bool has_sizes(const int64_t* sizes, int64_t rank, std::initializer_list<int64_t> wanted) {
  return rank == static_cast<int64_t>(wanted.size()) && std::equal(wanted.begin(), wanted.end(), sizes);
}

// Whether the address ranges of two tensors meet.
inline bool overlap(const Tensor& a, const Tensor& b) {
  const auto range = [](const Tensor& t) {
    const uintptr_t start = address(t);
    int64_t last = 0;
    for (int64_t axis = t.dim(); axis-- > 0;) last += (t.sizes()[axis] - 1) * t.strides()[axis];
    return std::pair<uintptr_t, uintptr_t>(start, start + static_cast<size_t>((last + 1) * bytes_of(t.dtype())));
  };
  if (device_of(a) != device_of(b) || numel(a) == 0 || numel(b) == 0) return false;
  const auto [a0, a1] = range(a);
  const auto [b0, b1] = range(b);
  return a0 < b1 && b0 < a1;
}

// Whether no two indices share memory.
inline bool own_memory(const Tensor& t) {
  if (t.is_contiguous() || numel(t) == 0) return true;
  std::vector<std::pair<int64_t, int64_t>> axes;
  for (int64_t axis = 0; axis < t.dim(); ++axis) axes.emplace_back(t.strides()[axis], t.sizes()[axis]);
  std::sort(axes.begin(), axes.end());
  int64_t reach = 0;
  bool nested = true;
  for (const auto& [stride, size] : axes) {
    nested = nested && (size == 1 || stride > reach);
    reach += (size - 1) * stride;
  }
  if (nested) return true;
  List offsets{0};  // dims may interleave without touching, as sizes (2, 3) with strides (3, 2) do: count
  for (const auto& [stride, size] : axes) {
    const size_t count = offsets.size();
    for (int64_t i = 1; i < size; ++i) {
      for (size_t at = 0; at < count; ++at) offsets.push_back(offsets[at] + i * stride);
    }
  }
  std::sort(offsets.begin(), offsets.end());
  return std::adjacent_find(offsets.begin(), offsets.end()) == offsets.end();
}

// Turns a status into an exception with the kernel's own message.
inline void conclude(int status, const char* where, const char (&message)[1024]) {
  if (status == SL_OK) [[likely]] return;
  std::string text(message, strnlen(message, sizeof message));
  if (text.empty()) text = "status " + std::to_string(status);
  if (status == SL_INVALID_ARGUMENT) {
    refuse("SL211", "the op does not accept these values", "{}", "{}", "", "correct the values that the message names",
           {where, text});
  }
  refuse("SL305", "the kernel refused its arguments", "{}", "{}", "", "correct the argument that the kernel's message names",
         {where, text});
}

}  // namespace shiplap
