#include <functions.h>

#include <map>

#include <c10/util/Exception.h>

namespace shiplap::backend::functions {

using dnnl::algorithm;
using dnnl::memory;

namespace {

constexpr auto kForward = dnnl::prop_kind::forward_inference;

algorithm binary_algorithm(const std::string& name) {
  static const std::map<std::string, algorithm> known{
      {"add", algorithm::binary_add}, {"sub", algorithm::binary_sub}, {"mul", algorithm::binary_mul},
      {"div", algorithm::binary_div}, {"eq", algorithm::binary_eq},   {"ne", algorithm::binary_ne},
      {"lt", algorithm::binary_lt},   {"le", algorithm::binary_le},   {"gt", algorithm::binary_gt},
      {"ge", algorithm::binary_ge}};
  return known.at(name);
}

algorithm eltwise_algorithm(const std::string& name) {
  static const std::map<std::string, algorithm> known{
      {"abs", algorithm::eltwise_abs},         {"elu", algorithm::eltwise_elu},
      {"exp", algorithm::eltwise_exp},         {"gelu_erf", algorithm::eltwise_gelu_erf},
      {"gelu_tanh", algorithm::eltwise_gelu_tanh}, {"linear", algorithm::eltwise_linear},
      {"log", algorithm::eltwise_log},         {"logistic", algorithm::eltwise_logistic},
      {"mish", algorithm::eltwise_mish},       {"pow", algorithm::eltwise_pow},
      {"relu", algorithm::eltwise_relu},       {"round", algorithm::eltwise_round},
      {"sqrt", algorithm::eltwise_sqrt},       {"swish", algorithm::eltwise_swish},
      {"tanh", algorithm::eltwise_tanh}};
  return known.at(name);
}

const memory::desc& desc_of(Node n) {
  return building()[n].desc;
}

// The same bytes with other dims.
Node viewed(Node n, const memory::dims& dims) {
  auto& g = building();
  if (desc_of(n).get_dims() == dims) {
    return n;
  }
  auto made = dense(desc_of(n).get_dims(), dtype(n)); // only dense memory can be given any dims
  if (desc_of(n) != made) {
    auto copy = g.scratch(made, dtype(n));
    g.step(dnnl::reorder({engine(), desc_of(n), engine(), made}), {{DNNL_ARG_FROM, n.id}, {DNNL_ARG_TO, copy.id}});
    n = copy;
  }
  Value v = g[n];
  v.desc = dense(dims, v.dtype);
  v.scalar = false;
  if (v.home == Value::kScratch && v.index == 0) {
    v.index = n.id + 1;
  }
  return g.add(std::move(v));
}

memory::dims with_rank(memory::dims dims, size_t rank) {
  dims.insert(dims.begin(), rank - dims.size(), 1);
  return dims;
}

Node one_to_one(Node a, dnnl::primitive primitive, const memory::desc& to) {
  auto& g = building();
  auto result = g.scratch(to, at::kFloat, g[a].scalar);
  g.step(std::move(primitive), {{DNNL_ARG_SRC, a.id}, {DNNL_ARG_DST, result.id}});
  return result;
}

// Operands of which either may be broadcast: oneDNN broadcasts the second only.
Node expanded(Node n, const memory::dims& dims) {
  if (desc_of(n).get_dims() == dims) {
    return n;
  }
  auto& g = building();
  Value zeros{Value::kConstant, 0, at::kFloat, dense(dims, at::kFloat), false, {}};
  zeros.bytes.resize(zeros.desc.get_size());
  auto base = g.add(std::move(zeros));
  auto result = g.scratch(dense(dims, at::kFloat), at::kFloat);
  dnnl::binary::primitive_desc pd(engine(), algorithm::binary_add, desc_of(base), desc_of(n), desc_of(result));
  g.step(dnnl::binary(pd), {{DNNL_ARG_SRC_0, base.id}, {DNNL_ARG_SRC_1, n.id}, {DNNL_ARG_DST, result.id}});
  return result;
}

} // namespace

Node binary(Node a, Node b, std::string name) {
  auto& g = building();
  bool scalar = g[a].scalar && g[b].scalar;
  auto rank = std::max(desc_of(a).get_dims().size(), desc_of(b).get_dims().size());
  a = viewed(a, with_rank(desc_of(a).get_dims(), rank));
  b = viewed(b, with_rank(desc_of(b).get_dims(), rank));
  auto dims = desc_of(a).get_dims();
  for (size_t d = 0; d < rank; ++d) {
    dims[d] = std::max(dims[d], desc_of(b).get_dims()[d]);
  }
  a = expanded(a, dims);
  auto result = g.scratch(dense(dims, at::kFloat), at::kFloat, scalar);
  dnnl::binary::primitive_desc pd(engine(), binary_algorithm(name), desc_of(a), desc_of(b), desc_of(result));
  g.step(dnnl::binary(pd), {{DNNL_ARG_SRC_0, a.id}, {DNNL_ARG_SRC_1, b.id}, {DNNL_ARG_DST, result.id}});
  return result;
}

Node eltwise(Node a, std::string name, double alpha, double beta) {
  auto to = dense(desc_of(a).get_dims(), at::kFloat);
  dnnl::eltwise_forward::primitive_desc pd(
      engine(), kForward, eltwise_algorithm(name), desc_of(a), to, static_cast<float>(alpha), static_cast<float>(beta));
  return one_to_one(a, dnnl::eltwise_forward(pd), to);
}

Node MatMul(Node a, Node b) {
  auto& g = building();
  auto dims = desc_of(a).get_dims();
  auto vector = desc_of(b).get_dims().size() == 1;
  if (vector) {
    b = viewed(b, {desc_of(b).get_dims()[0], 1});
  }
  dims.back() = desc_of(b).get_dims().back();
  auto result = g.scratch(dense(dims, at::kFloat), at::kFloat);
  dnnl::matmul::primitive_desc pd(engine(), desc_of(a), desc_of(b), desc_of(result));
  g.step(dnnl::matmul(pd), {{DNNL_ARG_SRC, a.id}, {DNNL_ARG_WEIGHTS, b.id}, {DNNL_ARG_DST, result.id}});
  return vector ? viewed(result, {dims[0]}) : result;
}

Node softmax(Node a, int64_t axis, algorithm which) {
  auto to = dense(desc_of(a).get_dims(), at::kFloat);
  dnnl::softmax_forward::primitive_desc pd(engine(), kForward, which, desc_of(a), to, static_cast<int>(axis));
  return one_to_one(a, dnnl::softmax_forward(pd), to);
}
Node Softmax(Node a, int64_t axis) {
  return softmax(a, axis, algorithm::softmax_accurate);
}
Node LogSoftmax(Node a, int64_t axis) {
  return softmax(a, axis, algorithm::softmax_log);
}

Node reduction(Node a, at::IntArrayRef axes, std::string name) {
  auto dims = desc_of(a).get_dims();
  auto before = dims;
  for (auto d : axes) {
    dims[d] = 1;
  }
  if (dims == before) { // sums of one element: oneDNN refuses a reduction that reduces nothing
    return a;
  }
  auto to = dense(dims, at::kFloat);
  auto which = name == "sum" ? algorithm::reduction_sum : algorithm::reduction_mean;
  dnnl::reduction::primitive_desc pd(engine(), which, desc_of(a), to, 0.f, 0.f);
  return one_to_one(a, dnnl::reduction(pd), to);
}

Node Concat(const std::vector<Node>& parts, int64_t axis) {
  auto& g = building();
  std::vector<memory::desc> descs;
  std::vector<std::pair<int, size_t>> arguments;
  auto dims = desc_of(parts.front()).get_dims();
  dims[axis] = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    descs.push_back(desc_of(parts[i]));
    dims[axis] += descs.back().get_dims()[axis];
    arguments.emplace_back(DNNL_ARG_MULTIPLE_SRC + static_cast<int>(i), parts[i].id);
  }
  auto result = g.scratch(dense(dims, at::kFloat), at::kFloat);
  arguments.emplace_back(DNNL_ARG_DST, result.id);
  g.step(dnnl::concat({engine(), desc_of(result), static_cast<int>(axis), descs}), std::move(arguments));
  return result;
}

Node Convolution(
    Node input, Node weight, at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups) {
  auto& g = building();
  auto x = desc_of(input).get_dims(), w = desc_of(weight).get_dims();
  memory::dims dims{x[0], w[0]}, gaps;
  for (size_t d = 0; d < stride.size(); ++d) {
    dims.push_back((x[d + 2] + 2 * padding[d] - dilation[d] * (w[d + 2] - 1) - 1) / stride[d] + 1);
    gaps.push_back(dilation[d] - 1); // oneDNN counts the holes
  }
  if (groups > 1) {
    w[0] /= groups;
    w.insert(w.begin(), groups);
    weight = viewed(weight, w);
  }
  auto result = g.scratch(dense(dims, at::kFloat), at::kFloat);
  memory::dims pads(padding.begin(), padding.end()), strides(stride.begin(), stride.end());
  dnnl::convolution_forward::primitive_desc pd(
      engine(), kForward, algorithm::convolution_direct, desc_of(input), desc_of(weight), desc_of(result), strides, gaps, pads, pads);
  g.step(dnnl::convolution_forward(pd), {{DNNL_ARG_SRC, input.id}, {DNNL_ARG_WEIGHTS, weight.id}, {DNNL_ARG_DST, result.id}});
  return result;
}

Node Biased(Node value, Node bias) {
  memory::dims dims(desc_of(value).get_dims().size(), 1);
  dims[1] = desc_of(bias).get_dims()[0];
  return binary(value, viewed(bias, dims), "add");
}

} // namespace shiplap::backend::functions
