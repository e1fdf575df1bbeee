// What ops.yaml may call. The generator reads these declarations: `inline` or `extern`
// first.
#pragma once

#include <tinyc.h>
#include <vendor.h>

namespace shiplap::backend::functions {

inline Node binary(Node a, Node b, int64_t op) {
  return elementwise<float>({a, b}, [=](const auto& in, float* out, int64_t n) {
    tinyc_binary(static_cast<char>(op), in[0], in[1], out, n);
  });
}
inline Node unary(Node a, int64_t f) {
  return elementwise<float>({a}, [=](const auto& in, float* out, int64_t n) {
    tinyc_unary(static_cast<char>(f), in[0], out, n);
  });
}
inline Node Add(Node a, Node b) { return binary(a, b, '+'); }
inline Node Subtract(Node a, Node b) { return binary(a, b, '-'); }
inline Node Multiply(Node a, Node b) { return binary(a, b, '*'); }
inline Node Divide(Node a, Node b) { return binary(a, b, '/'); }
inline Node Greater(Node a, Node b) { return binary(a, b, '>'); }
inline Node Gate(Node a, Node b) { return binary(a, b, 'g'); }
inline Node Relu(Node a) { return unary(a, 'r'); }
inline Node Tanh(Node a) { return unary(a, 't'); }
inline Node Exp(Node a) { return unary(a, 'e'); }
inline Node MatMul(Node a, Node b) {
  auto rows = a->sizes[0], inner = a->sizes[1], columns = b->sizes[1];
  return node<float>({rows, columns}, {a, b}, [=](const auto& in, float* out) {
    tinyc_matmul(in[0], in[1], out, rows, inner, columns);
  });
}
inline Node Sum(Node a, std::vector<int64_t> axes) {
  return reduce<float>(a, axes, tinyc_sum);
}
inline Node Softmax(Node a, int64_t dim) { return along<float>(a, dim, tinyc_softmax); }

}  // namespace shiplap::backend::functions
