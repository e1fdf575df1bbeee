// What metadata of oneDNN may call. Parsed by the generator: one declaration a function, `extern` or `inline` first.
#pragma once

#include <string>

#include <vendor.h>

namespace shiplap::backend::functions {

// --- elementwise; a dim of 1 is broadcast
extern Node binary(Node a, Node b, std::string algorithm);
inline Node Add(Node a, Node b) { return binary(a, b, "add"); }
inline Node Subtract(Node a, Node b) { return binary(a, b, "sub"); }
inline Node Multiply(Node a, Node b) { return binary(a, b, "mul"); }
inline Node Divide(Node a, Node b) { return binary(a, b, "div"); }
inline Node Equal(Node a, Node b) { return binary(a, b, "eq"); }
inline Node NotEqual(Node a, Node b) { return binary(a, b, "ne"); }
inline Node Less(Node a, Node b) { return binary(a, b, "lt"); }
inline Node LessEqual(Node a, Node b) { return binary(a, b, "le"); }
inline Node Greater(Node a, Node b) { return binary(a, b, "gt"); }
inline Node GreaterEqual(Node a, Node b) { return binary(a, b, "ge"); }

extern Node eltwise(Node a, std::string algorithm, double alpha, double beta);
inline Node Abs(Node a) { return eltwise(a, "abs", 0, 0); }
inline Node Elu(Node a, double alpha) { return eltwise(a, "elu", alpha, 0); }
inline Node Exp(Node a) { return eltwise(a, "exp", 0, 0); }
inline Node GeluErf(Node a) { return eltwise(a, "gelu_erf", 0, 0); }
inline Node GeluTanh(Node a) { return eltwise(a, "gelu_tanh", 0, 0); }
inline Node Linear(Node a, double alpha, double beta) { return eltwise(a, "linear", alpha, beta); }
inline Node Log(Node a) { return eltwise(a, "log", 0, 0); }
inline Node Mish(Node a) { return eltwise(a, "mish", 0, 0); }
inline Node Negative(Node a) { return eltwise(a, "linear", -1, 0); }
inline Node Power(Node a, double exponent) { return eltwise(a, "pow", 1, exponent); }
inline Node Relu(Node a, double slope) { return eltwise(a, "relu", slope, 0); }
inline Node Round(Node a) { return eltwise(a, "round", 0, 0); }
inline Node Sigmoid(Node a) { return eltwise(a, "logistic", 0, 0); }
inline Node Sqrt(Node a) { return eltwise(a, "sqrt", 0, 0); }
inline Node Swish(Node a) { return eltwise(a, "swish", 1, 0); }
inline Node Tanh(Node a) { return eltwise(a, "tanh", 0, 0); }

// --- the rest
extern Node MatMul(Node a, Node b);
extern Node Softmax(Node a, int64_t axis);
extern Node LogSoftmax(Node a, int64_t axis);
extern Node reduction(Node a, at::IntArrayRef axes, std::string algorithm);
inline Node ReduceSum(Node a, at::IntArrayRef axes) { return reduction(a, axes, "sum"); }
inline Node ReduceMean(Node a, at::IntArrayRef axes) { return reduction(a, axes, "mean"); }
extern Node Concat(const std::vector<Node>& parts, int64_t axis);
extern Node Convolution(Node input, Node weight, at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups);
// A bias for each channel.
extern Node Biased(Node value, Node bias);

} // namespace shiplap::backend::functions
