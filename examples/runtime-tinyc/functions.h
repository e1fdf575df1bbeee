// What ops.yaml may call. The generator reads these declarations: one line each, `inline` or `extern` first.
#pragma once

#include <vendor.h>

namespace shiplap::backend::functions {

extern Node binary(Node a, Node b, int64_t op);
extern Node unary(Node a, int64_t f);
inline Node Add(Node a, Node b) { return binary(a, b, '+'); }
inline Node Subtract(Node a, Node b) { return binary(a, b, '-'); }
inline Node Multiply(Node a, Node b) { return binary(a, b, '*'); }
inline Node Divide(Node a, Node b) { return binary(a, b, '/'); }
inline Node Gate(Node a, Node b) { return binary(a, b, 'g'); }
inline Node Relu(Node a) { return unary(a, 'r'); }
inline Node Tanh(Node a) { return unary(a, 't'); }
inline Node Exp(Node a) { return unary(a, 'e'); }
extern Node MatMul(Node a, Node b);
extern Node Sum(Node a, std::vector<int64_t> axes);

}  // namespace shiplap::backend::functions
