// A graph for a library whose functions compute when they are called, on memory that
// this process addresses. A runtime with graph="eager" has this file in the place of a
// vendor.h of its own.
#pragma once

#include <c10/core/Scalar.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>
#include <shiplap_backend/signature.h>

#include <functional>
#include <memory>
#include <vector>

namespace shiplap::backend {

using Sizes = std::vector<int64_t>;

// Computes one value. The operands and the result are dense and row-major. The result
// begins as zeros.
using Compute = std::function<void(c10::ArrayRef<const void*> in, void* out)>;

// A value that is still to be computed. An input has no `compute`.
struct Value {
  at::ScalarType dtype;
  Sizes sizes;
  std::vector<std::shared_ptr<const Value>> operands;
  Compute compute;
  // the same in blocks of `block`, if it was made there
  std::shared_ptr<const Value> blocks = nullptr;
  int64_t block = 0;
};
using Node = std::shared_ptr<const Value>;

class Graph {
 public:
  explicit Graph(const Signature& signature);
  Node input(size_t i) const { return inputs[i]; }
  Node input(size_t i, at::ScalarType dtype) const;
  void output(size_t i, const Node& value);

  Signature signature;
  std::vector<Node> inputs, results;
  // what the memory of each input holds: the input, or its blocks
  std::vector<Node> sources;
};

Node convert(const Node& value, at::ScalarType dtype);
Node constant(const at::Scalar& value, at::ScalarType dtype);
Node constant(at::IntArrayRef values);

// What functions of a runtime are made of.

int64_t count(const Sizes& sizes);             // elements
// the sizes that the nodes have in common
Sizes broadcast(const std::vector<Node>& of);
Node expand(const Node& value, const Sizes& sizes);
// dim i of the result is dim order[i] of `value`
Node permute(const Node& value, const Sizes& order);
Node reshape(const Node& value, const Sizes& sizes);
// The last dim in blocks of `block` elements: [ceil(n / block), other dims..., block],
// padded with zeros.
Sizes sizes_in_blocks(const Sizes& sizes, int64_t block);
Node to_blocks(const Node& value, int64_t block);
Node from_blocks(const Node& blocks, const Sizes& sizes);

// A value of any dtype: `compute(in, out)` gets pointers to void.
Node node(at::ScalarType dtype, Sizes sizes, std::vector<Node> operands,
          Compute compute);

// A value of T made of values of T: `compute(in, out)`, where in[0] is a const T*, and
// out a T*.
template <class T, class F>
Node node(Sizes sizes, std::vector<Node> operands, F compute) {
  constexpr auto dtype = c10::CppTypeToScalarType<T>::value;
  for (const auto& o : operands) {
    TORCH_CHECK_NOT_IMPLEMENTED(o->dtype == dtype, "a function of ", dtype, " got ",
                                o->dtype);
  }
  auto typed = [compute](c10::ArrayRef<const void*> in, void* out) {
    std::vector<const T*> pointers;
    for (auto p : in) pointers.push_back(static_cast<const T*>(p));
    compute(pointers, static_cast<T*>(out));
  };
  return node(dtype, std::move(sizes), std::move(operands), typed);
}

// Elementwise: `compute(in, out, n)`. The operands are expanded to the sizes that they
// have in common.
template <class T, class F>
Node elementwise(std::vector<Node> operands, F compute) {
  auto sizes = broadcast(operands);
  for (auto& o : operands) o = expand(o, sizes);
  auto all = [compute, n = count(sizes)](const auto& in, T* out) {
    compute(in, out, n);
  };
  return node<T>(sizes, std::move(operands), all);
}

// `axes`, none of them negative, behind the other dims; and how to undo that.
struct Moved {
  Node value;
  Sizes back;
  int64_t rows, columns;  // elements of the other dims, and of `axes`
};
Moved behind(const Node& value, const Sizes& axes);

// Over `axes`: `compute(in, out, rows, columns)` makes an element of each row. The dims
// stay, with the size 1.
template <class T, class F>
Node reduce(const Node& value, const Sizes& axes, F compute) {
  auto [moved, back, rows, columns] = behind(value, axes);
  auto kept = value->sizes;
  for (auto d : axes) {
    if (!kept.empty()) kept[d] = 1;
  }
  auto each = [compute, rows = rows, columns = columns](const auto& in, T* out) {
    compute(in[0], out, rows, columns);
  };
  return node<T>(kept, {moved}, each);
}

// Along one dim: `compute(in, out, rows, columns)` makes a row of each row.
template <class T, class F>
Node along(const Node& value, int64_t dim, F compute) {
  auto [moved, back, rows, columns] = behind(value, {dim});
  auto each = [compute, rows = rows, columns = columns](const auto& in, T* out) {
    compute(in[0], out, rows, columns);
  };
  return permute(node<T>(moved->sizes, {moved}, each), back);
}

// The same for a library whose memory is in blocks of the last dim. What one such
// function makes, the next one gets as it is.

// As node<T>: in[0] and `out` are in blocks. The padding of an operand is zeros.
template <class T, class F>
Node node(int64_t block, const Sizes& sizes, std::vector<Node> operands, F compute) {
  for (auto& o : operands) o = to_blocks(o, block);
  const Sizes blocks = sizes_in_blocks(sizes, block);
  return from_blocks(node<T>(blocks, std::move(operands), compute), sizes);
}

// `n` counts the padding.
template <class T, class F>
Node elementwise(int64_t block, std::vector<Node> operands, F compute) {
  auto sizes = broadcast(operands);
  for (auto& o : operands) o = expand(o, sizes);
  const int64_t n = count(sizes_in_blocks(sizes, block));
  auto all = [compute, n](const auto& in, T* out) { compute(in, out, n); };
  return node<T>(block, sizes, std::move(operands), all);
}

// `in` is a matrix of rows and columns in blocks, and `out` one of rows and one column.
template <class T, class F>
Node reduce(int64_t block, const Node& value, const Sizes& axes, F compute) {
  auto [moved, back, rows, columns] = behind(value, axes);
  auto kept = value->sizes;
  for (auto d : axes) {
    if (!kept.empty()) kept[d] = 1;
  }
  auto each = [compute, rows = rows, columns = columns](const auto& in, T* out) {
    compute(in[0], out, rows, columns);
  };
  const Node flat = reshape(moved, {rows, columns});
  return reshape(node<T>(block, {rows, 1}, {flat}, each), kept);
}

// `in` and `out` are matrices of rows and columns in blocks.
template <class T, class F>
Node along(int64_t block, const Node& value, int64_t dim, F compute) {
  auto [moved, back, rows, columns] = behind(value, {dim});
  auto each = [compute, rows = rows, columns = columns](const auto& in, T* out) {
    compute(in[0], out, rows, columns);
  };
  const Node flat = reshape(moved, {rows, columns});
  const Node done = node<T>(block, {rows, columns}, {flat}, each);
  return permute(reshape(done, moved->sizes), back);
}

}  // namespace shiplap::backend
