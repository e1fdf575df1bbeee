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
  const ElementType element = element_type(tensor.dtype());
  view.tensor = DLTensor{tensor.data(), {dl_device(tensor.device_type()), std::max(tensor.device_index(), 0)},
                         static_cast<int32_t>(rank), {element.code, element.bits, 1}, view.shape.data(),
                         view.strides.data(), 0};
  return &view.tensor;
}

inline Device device_of(const Tensor& t) { return {t.device_type(), t.device_index()}; }

inline int64_t numel(const Tensor& t) {
  return std::accumulate(t.sizes(), t.sizes() + t.dim(), int64_t{1}, std::multiplies<int64_t>());
}

// Whether the address ranges of two tensors meet.
inline bool overlap(const Tensor& a, const Tensor& b) {
  const auto range = [](const Tensor& t) {
    const uintptr_t start = reinterpret_cast<uintptr_t>(t.data());
    int64_t last = 0;
    for (int64_t axis = t.dim(); axis-- > 0;) last += (t.sizes()[axis] - 1) * t.strides()[axis];
    return std::pair<uintptr_t, uintptr_t>(start, start + static_cast<size_t>((last + 1) * element_type(t.dtype()).bits / 8));
  };
  if (numel(a) == 0 || numel(b) == 0) return false;
  const auto [a0, a1] = range(a);
  const auto [b0, b1] = range(b);
  return a0 < b1 && b0 < a1;
}

inline std::string show(const int64_t* shape, int64_t rank) {
  std::string text = "(";
  for (int64_t i = 0; i < rank; ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + ")";
}

constexpr const char* kGiven = "given output does not fit";

// Names what a check is about, so that its text is made only when it fails.
struct Argument {
  const char* op;
  const char* name;
  const char* declared;

  std::string where() const { return std::string(op) + ", argument '" + name + "'"; }
  void rank(const Tensor& t, int64_t want) const {
    const int64_t got = t.dim();
    if (got != want) {
      refuse("SL201", "wrong number of dims", where(), std::to_string(got) + " dims, shape " + show(t.sizes(), got), declared);
    }
  }
  void size(const char* dim, int axis, int64_t got, int64_t want) const {
    if (got == want) return;
    refuse("SL202", "sizes disagree", where() + ", dim '" + dim + "' (axis " + std::to_string(axis) + ")",
           std::string(dim) + " = " + std::to_string(got), std::string(dim) + " = " + std::to_string(want));
  }
  void dtype(int32_t got, uint64_t accepted) const {
    if (got >= 0 && got < 64 && (accepted >> got & 1)) return;
    refuse("SL204", "dtype not accepted", where(), dtype_name(got), declared);
  }
  void same_dtype(int32_t got, int32_t want) const {
    if (got == want) return;
    refuse("SL205", "dtypes disagree", where(), dtype_name(got), dtype_name(want));
  }
  void device(const Tensor& t, Device want) const {
    if (device_of(t) != want) refuse("SL206", "devices disagree", where(), "another device", "that of the first tensor");
  }
  void fixed(int axis, int64_t got, int64_t want) const {
    if (got == want) return;
    refuse("SL203", "fixed size", where(), "size " + std::to_string(got) + " in axis " + std::to_string(axis),
           std::to_string(want));
  }
  // A tensor that is written to must not be another argument too.
  void unshared(const Tensor& written, const Tensor& other, const char* other_name) const {
    if (!written || !other || written.data() != other.data() || numel(other) == 0) return;
    refuse("SL210", "mutated tensor is another argument too", where(), std::string("memory of argument '") + other_name + "'",
           "memory of its own");
  }
  // An output that the caller owns.
  void fits(const Tensor& t, std::initializer_list<int64_t> shape, int32_t dtype, Device on) const {
    const int64_t rank = t.dim();
    const auto place = [this] { return std::string(op) + ", output '" + name + "'"; };
    if (t.dtype() != dtype || device_of(t) != on) refuse("SL212", kGiven, place(), dtype_name(t.dtype()), dtype_name(dtype));
    if (rank != static_cast<int64_t>(shape.size()) || !std::equal(shape.begin(), shape.end(), t.sizes())) {
      refuse("SL212", kGiven, place(), "shape " + show(t.sizes(), rank), "shape " + show(shape.begin(), shape.size()));
    }
    if (!t.is_contiguous()) refuse("SL212", kGiven, place(), "strides " + show(t.strides(), rank), "a contiguous tensor");
  }
  void aligned(const Tensor& t, uintptr_t bytes) const {
    const uintptr_t beyond = reinterpret_cast<uintptr_t>(t.data()) % bytes;
    if (beyond == 0) return;
    refuse("SL207", "layout", where(), "an address that is " + std::to_string(beyond) + " modulo " + std::to_string(bytes),
           "memory aligned to " + std::to_string(bytes) + " bytes");
  }
  void contiguous(const Tensor& t) const {
    if (!t.is_contiguous()) refuse("SL207", "layout", where(), "strides " + show(t.strides(), t.dim()), "a contiguous tensor");
  }
};

// What the caller owns and the kernel writes lies apart from its arguments and from each other.
inline void apart(const char* op, std::initializer_list<const Tensor*> written, std::initializer_list<const Tensor*> read) {
  const auto refuse_if = [op](const Tensor* a, const Tensor* b) {
    if (*a && *b && overlap(*a, *b)) refuse("SL210", "output overlaps another tensor", op, "shared memory", "memory of its own");
  };
  for (auto a = written.begin(); a != written.end(); ++a) {
    for (auto b = written.begin(); b != a; ++b) refuse_if(*a, *b);
    for (const Tensor* b : read) refuse_if(*a, b);
  }
}

inline void require(bool holds, const char* op, const char* condition) {
  if (!holds) refuse("SL208", "precondition", op, "a call that violates it", condition);
}

inline void agree(const char* op, const char* dim, int64_t got, int64_t want) {
  if (got == want) return;
  refuse("SL202", "sizes disagree", std::string(op) + ", dim '" + dim + "'", std::to_string(got), std::to_string(want));
}

inline void within_bound(const char* where, const char* dim, const char* expression, int64_t got, int64_t bound) {
  if (got >= 0 && got <= bound) return;
  const std::string name = dim;
  refuse("SL302", "data-dependent size exceeds its bound", where, name + " = " + std::to_string(got),
         name + " <= " + expression + " = " + std::to_string(bound));
}

// Turns a status into an exception with the kernel's own message.
inline void conclude(int status, const char* where, const char (&message)[1024]) {
  if (status == SL_OK) return;
  std::string text(message, strnlen(message, sizeof message));
  if (text.empty()) text = "status " + std::to_string(status);
  if (status == SL_INVALID_ARGUMENT) refuse("SL211", "values not accepted", where, text, "");
  refuse("SL305", "kernel refused its arguments", where, text, "");
}

}  // namespace shiplap
