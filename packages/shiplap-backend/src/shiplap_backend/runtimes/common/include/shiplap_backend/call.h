// One execution of one overload: what generated code says of it, and the cache key that follows
// from that.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>
#include <c10/util/FunctionRef.h>
#include <shiplap_backend/cache.h>
#include <shiplap_backend/counters.h>
#include <shiplap_backend/signature.h>

#include <array>
#include <optional>
#include <string_view>
#include <type_traits>
#include <vector>

namespace shiplap::backend {

// Thrown by `emit` for a number that the dtype of the graph does not hold: the CPU computes the
// call.
struct Unheld {};

class Call {
 public:
  explicit Call(OpInfo& op);

  // The order of calls is the index for Graph::input. Any strides; a 0-dim CPU tensor is read where
  // it is.
  Call& input(const at::Tensor& t);
  Call& inputs(at::TensorList list);  // each is one input
  // A 0-dim input: its value is not part of the key, so a new value compiles nothing.
  Call& scalar(const at::Scalar& s, at::ScalarType as);
  // Part of the key, with its type: 1, 1.0 and true are three attributes.
  template <class T>
  Call& attribute(const T& value) {
    append(value);
    return *this;
  }
  // Already allocated; any strides; may share memory with an input.
  Call& output(const at::Tensor& t);

  // `emit` is called on a miss only. There is nothing to do if all outputs are empty. Returns
  // false, and nothing has been computed, if `emit` threw `Unheld`.
  bool run(c10::function_ref<void(Graph&)> emit);

 private:
  struct Operand {
    at::Tensor tensor;  // undefined: a scalar
    at::ScalarType dtype;
    std::array<char, 16> value;
    bool row_major = true, copied = false;
    c10::SmallVector<uint8_t, 6> order;  // as Port::order, only if not row-major
    uint64_t expanded = 0;               // bit i: dim i of the tensor is expanded
  };
  enum Tag : int64_t { kBool, kInt, kFloat, kText, kType, kScalar, kNone, kSome, kList };

  template <class T>
  void append(const T& value) {
    if constexpr (std::is_same_v<T, bool>) {
      word(kBool, value);
    } else if constexpr (std::is_same_v<T, at::Scalar>) {
      append_scalar(value);
    } else if constexpr (std::is_enum_v<T>) {
      word(kType, static_cast<int64_t>(value));
    } else if constexpr (std::is_integral_v<T>) {
      word(kInt, static_cast<int64_t>(value));
    } else if constexpr (std::is_floating_point_v<T>) {
      append_double(static_cast<double>(value));
    } else if constexpr (std::is_convertible_v<T, std::string_view>) {
      append_text(value);
    } else {
      append_elements(value);
    }
  }
  template <class T>
  void append(const std::optional<T>& value) {
    key_.push_back(value ? kSome : kNone);
    if (value) {
      append(*value);
    }
  }
  template <class T>
  void append(const at::OptionalArrayRef<T>& value) {
    key_.push_back(value ? kSome : kNone);
    if (value) {
      append(*value);
    }
  }
  template <class List>
  void append_elements(const List& values) {
    word(kList, static_cast<int64_t>(values.size()));
    for (size_t i = 0; i < values.size();
         ++i) {  // by index: vector<bool> and bitsets have no plain elements
      append(static_cast<std::decay_t<decltype(values[0])>>(values[i]));
    }
  }
  void word(Tag tag, int64_t value) {
    key_.push_back(tag);
    key_.push_back(value);
  }
  void append_scalar(const at::Scalar& value);
  void append_double(double value);
  void append_text(std::string_view text);

  Operand& add(c10::SmallVectorImpl<Operand>& to, const at::Tensor& t);
  void check_device(const at::Tensor& t) const;
  void place_outputs();
  void execute(std::shared_ptr<Executable> executable);
  at::Tensor placed(const Operand& operand) const;  // discrete memory only
  void append_operand(const Operand& operand);
  Signature signature() const;

  OpInfo& op_;
  const int64_t block_;  // of the layout at the start of the call: another thread may set another
  Key key_;
  c10::SmallVector<Operand, 4> inputs_;
  c10::SmallVector<Operand, 2> outputs_;
  c10::SmallVector<at::Tensor, 2>
      targets_;  // where scratch results go; undefined: the output is written in place
};

Cache<Executable>& executables();

// Whether this process was forked from one that had computed on the device; it cannot.
bool in_bad_fork();

// The layout that the target stores tensors in: their last dim in blocks of `last`, padded; 0:
// plain row-major memory. Applied at the boundary of a graph only; tensors keep torch's layout.
struct Blocking {
  int64_t last = 0;
};
Blocking layout();
void set_layout(Blocking blocking);

}  // namespace shiplap::backend
