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

// (stride in bytes, size) of the axes along which addresses differ, the smallest stride first: the bytes of an element,
// then those of the tensor, of which equal strides are one.
using Axes = std::vector<std::pair<int64_t, int64_t>>;

inline Axes axes_of(const Tensor& t) {
  const int64_t bytes = bytes_of(t.dtype());
  Axes axes;
  const auto add = [&axes](int64_t stride, int64_t size) {
    if (stride == 0 || size <= 1) return;
    for (auto& [other, count] : axes) {
      if (other == stride) {
        count += size - 1;
        return;
      }
    }
    axes.emplace_back(stride, size);
  };
  for (int64_t axis = 0; axis < t.dim(); ++axis) add(t.strides()[axis] * bytes, t.sizes()[axis]);
  add(1, bytes);
  std::sort(axes.begin(), axes.end());
  return axes;
}

inline int64_t reach_of(const Axes& axes) {
  int64_t reach = 0;
  for (const auto& [stride, size] : axes) reach += (size - 1) * stride;
  return reach;
}

// The same addresses by fewer axes, where one continues another.
inline Axes merged(const Axes& axes) {
  Axes made;
  for (const auto& [stride, size] : axes) {
    if (!made.empty() && made.back().first * made.back().second == stride) made.back().second *= size;
    else made.emplace_back(stride, size);
  }
  return made;
}

// Whether boxes meet on the grid of all strides: 1 or 0, or -1 where an address has several places on the grid.
inline int boxes_meet(int64_t distance, const Axes& a, const Axes& b) {
  std::vector<int64_t> strides{1};
  for (const Axes* axes : {&a, &b}) {
    for (const auto& [stride, size] : *axes) strides.push_back(stride);
  }
  std::sort(strides.begin(), strides.end());
  strides.erase(std::unique(strides.begin(), strides.end()), strides.end());
  const auto size_of = [](const Axes& axes, int64_t stride) {
    for (const auto& [other, size] : axes) {
      if (other == stride) return size;
    }
    return int64_t{1};
  };
  std::vector<int64_t> begins(strides.size());
  for (size_t i = strides.size(); i-- > 0;) {
    begins[i] = distance / strides[i];
    distance %= strides[i];
  }
  bool meeting = true;
  int64_t reach = 0;
  for (size_t i = 0; i < strides.size(); ++i) {
    if (reach >= strides[i]) return -1;
    const int64_t left = size_of(a, strides[i]), right = size_of(b, strides[i]);
    meeting = meeting && begins[i] < left;
    reach += (std::max(left, begins[i] + right) - 1) * strides[i];
  }
  return meeting ? 1 : 0;
}

inline std::vector<int64_t> offsets_of(const Axes& axes, int64_t first) {
  std::vector<int64_t> offsets{first};
  for (const auto& [stride, size] : axes) {
    const size_t count = offsets.size();
    for (int64_t i = 1; i < size; ++i) {
      for (size_t at = 0; at < count; ++at) offsets.push_back(offsets[at] + i * stride);
    }
  }
  std::sort(offsets.begin(), offsets.end());
  return offsets;
}

// Whether a byte of memory belongs to both tensors; true also where this would take too long to find out.
[[gnu::noinline]] inline bool meet(uintptr_t distance, const Tensor& a, const Tensor& b) {
  const Axes first = axes_of(a), second = axes_of(b);
  if (distance > static_cast<uintptr_t>(reach_of(first))) return false;
  const int64_t apart = static_cast<int64_t>(distance);
  if (const int known = boxes_meet(apart, first, second); known >= 0) return known == 1;
  if (const int known = boxes_meet(apart, merged(first), merged(second)); known >= 0) return known == 1;
  double count = 0;
  for (const Axes* axes : {&first, &second}) {
    double each = 1;
    for (const auto& [stride, size] : *axes) each *= static_cast<double>(size);
    count += each;
  }
  if (count > 65536) return true;
  const std::vector<int64_t> left = offsets_of(first, 0), right = offsets_of(second, apart);
  size_t i = 0, j = 0;
  while (i < left.size() && j < right.size()) {
    if (left[i] == right[j]) return true;
    left[i] < right[j] ? ++i : ++j;
  }
  return false;
}

inline bool shares_memory(const Tensor& a, const Tensor& b) {
  if (numel(a) == 0 || numel(b) == 0) return false;
  const uintptr_t first = address(a), second = address(b);
  return first <= second ? meet(second - first, a, b) : meet(first - second, b, a);
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
  const bool silent = text.empty();
  if (silent) text = "status " + std::to_string(status);
  if (status == SL_INVALID_ARGUMENT) {
    refuse("SL211", "the op does not accept these values", "{}", "{}", "",
           "replace or remove the input value that 'got' describes", {where, text});
  }
  refuse("SL305", "the kernel refused its arguments", "{}", "{}", "",
         silent ? "write the reason of the status to ctx->error in the kernel"
                : "pass arguments that the kernel supports, according to the message under 'got'",
         {where, text});
}

}  // namespace shiplap
