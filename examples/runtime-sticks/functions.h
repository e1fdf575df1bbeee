// What ops.yaml may call on the stick library, whose memory is in blocks of 32.
#pragma once
#include <sticks.h>
#include <vendor.h>

namespace shiplap::backend::functions {

using h = at::Half;
constexpr int64_t kStick = 32;

inline Node binary(Node a, Node b, int64_t op) {
  return elementwise<h>(kStick, {a, b}, [=](const auto& in, h* out, int64_t n) {
    st_binary(static_cast<char>(op), in[0], in[1], out, 1, n);
  });
}
inline Node unary(Node a, int64_t op) {
  return elementwise<h>(kStick, {a}, [=](const auto& in, h* out, int64_t n) {
    st_unary(static_cast<char>(op), in[0], out, 1, n);
  });
}
inline Node Add(Node a, Node b) { return binary(a, b, '+'); }
inline Node Sub(Node a, Node b) { return binary(a, b, '-'); }
inline Node Mul(Node a, Node b) { return binary(a, b, '*'); }
inline Node Div(Node a, Node b) { return binary(a, b, '/'); }
inline Node Gt(Node a, Node b) { return binary(a, b, '>'); }
inline Node Ge(Node a, Node b) { return binary(a, b, 'g'); }
inline Node Lt(Node a, Node b) { return binary(a, b, '<'); }
inline Node Le(Node a, Node b) { return binary(a, b, 'l'); }
inline Node Eq(Node a, Node b) { return binary(a, b, '='); }
inline Node Max(Node a, Node b) { return binary(a, b, 'M'); }
inline Node Min(Node a, Node b) { return binary(a, b, 'm'); }
inline Node Neg(Node a) { return unary(a, 'n'); }
inline Node Exp(Node a) { return unary(a, 'e'); }
inline Node Log(Node a) { return unary(a, 'l'); }
inline Node Sqrt(Node a) { return unary(a, 's'); }
inline Node Rsqrt(Node a) { return unary(a, 'R'); }
inline Node Tanh(Node a) { return unary(a, 't'); }
inline Node Sigmoid(Node a) { return unary(a, 'g'); }
inline Node Relu(Node a) { return unary(a, 'r'); }
inline Node Gelu(Node a) { return unary(a, 'G'); }
inline Node Silu(Node a) { return unary(a, 'S'); }
inline Node Abs(Node a) { return unary(a, 'a'); }
inline Node MatMul(Node a, Node b) {  // [m, k] x [k, n], or batches of them
  auto r = a->sizes.size();
  auto m = a->sizes[r - 2], k = a->sizes[r - 1], n = b->sizes[r - 1];
  if (r == 2) {
    return node<h>(kStick, {m, n}, {a, b}, [=](const auto& in, h* out) { st_matmul(in[0], in[1], out, m, k, n); });
  }
  auto sizes = a->sizes;
  sizes[r - 1] = n;
  return node<h>(sizes, {a, b}, [=, batches = a->sizes[0]](const auto& in, h* out) {
    std::vector<h> x(st_size(m, k)), y(st_size(k, n)), z(st_size(m, n));
    for (int64_t i = 0; i < batches; ++i) {
      st_pack(in[0] + i * m * k, x.data(), m, k);
      st_pack(in[1] + i * k * n, y.data(), k, n);
      st_matmul(x.data(), y.data(), z.data(), m, k, n);
      st_unpack(z.data(), out + i * m * n, m, n);
    }
  });
}
inline Node reduce_sticks(Node a, std::vector<int64_t> axes, int64_t op) {
  return reduce<h>(kStick, a, axes, [=](const h* in, h* out, int64_t rows, int64_t columns) {
    st_reduce(static_cast<char>(op), in, out, rows, columns);
  });
}
inline Node Sum(Node a, std::vector<int64_t> axes) { return reduce_sticks(a, axes, '+'); }
inline Node Amax(Node a, std::vector<int64_t> axes) { return reduce_sticks(a, axes, 'M'); }
inline Node Softmax(Node a, int64_t dim) {
  return along<h>(kStick, a, dim, [](const h* in, h* out, int64_t rows, int64_t columns) {
    st_softmax(in, out, rows, columns);
  });
}

}  // namespace shiplap::backend::functions
