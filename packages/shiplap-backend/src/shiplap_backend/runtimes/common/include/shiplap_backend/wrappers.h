// All that generated wrappers include of ours.
#pragma once

#include <cmath>
#include <limits>

#include <shiplap_backend/attributes.h>
#include <shiplap_backend/backend.h>
#include <shiplap_backend/infer.h>
#include <shiplap_backend/structured.h>
#include <shiplap_backend/wrapper.h>

namespace shiplap::backend {

namespace detail {
template <class Schema>
struct Plain;
template <class R, class... A>
struct Plain<R(A...)> {
  using type = R (*)(typename c10::remove_symint<A>::type...);
};
} // namespace detail

// A wrapper whose signature is not the operator's is a compile error here; torch would abort at import.
template <class Op, auto function>
auto registered() {
  static_assert(
      std::is_same_v<decltype(function), typename detail::Plain<typename Op::schema>::type>,
      "the wrapper's signature is not that of the operator in this torch: run `shiplap backend gen`");
  return c10::CompileTimeFunctionPointer<std::remove_pointer_t<decltype(function)>, function>();
}

template <class T>
T to(at::IntArrayRef values) {
  return T(values.begin(), values.end());
}

// An input in the dtype of the computation. An integer wraps at the width of the promoted dtype first: 255 as uint8 is -1.
inline Node promoted(Graph& g, size_t i, at::ScalarType common, at::ScalarType compute) {
  return at::isIntegralType(common, false) && common != compute ? convert(g.input(i, common), compute) : g.input(i, compute);
}

// A Python number among tensors (`x * 1.5`) in the dtype of the computation, which the vendor has: the number itself is a double or an
// int64, which the vendor may lack. An integer wraps at the width of the promoted dtype first, as in `promoted`.
inline at::Tensor computed(const at::Tensor& t, at::ScalarType common, at::ScalarType compute) {
  if (!t.defined() || !t.is_cpu() || !t.unsafeGetTensorImpl()->is_wrapped_number()) return t;
  return t.to(common).to(compute);
}

// Whether `dtype` holds a finite number to `roundings` of its last digits. The CPU keeps a number beside float16 or bfloat16 operands in
// float32: a call of which the number became infinite, 0 or a few bits of a subnormal would have other results.
inline bool holds(double number, at::ScalarType dtype, int roundings = 1) {
  const auto close = [&](double kept, double precision) {
    return !std::isfinite(number) || std::abs(kept - number) <= roundings * precision * std::abs(number);
  };
  switch (dtype) {
    case at::kHalf: return close(at::Half(static_cast<float>(number)), std::numeric_limits<at::Half>::epsilon());
    case at::kBFloat16: return close(at::BFloat16(static_cast<float>(number)), std::numeric_limits<at::BFloat16>::epsilon());
    case at::kFloat: return !std::isfinite(number) || std::isfinite(static_cast<float>(number));  // c10::Scalar raises
    default: return true;  // the CPU computes in this dtype, too
  }
}
inline bool holds(const at::Scalar& number, at::ScalarType dtype, int roundings = 1) {
  return number.isComplex() || holds(number.toDouble(), dtype, roundings);
}
inline bool holds(const std::optional<at::Scalar>& number, at::ScalarType dtype) { return !number.has_value() || holds(*number, dtype); }
// Of tensors only a Python number may lose its value: `x * 1.5`.
inline bool holds(const at::Tensor& t, at::ScalarType dtype) {
  const bool narrow = dtype == at::kHalf || dtype == at::kBFloat16;
  if (!narrow || !t.defined() || !t.is_cpu() || !t.unsafeGetTensorImpl()->is_wrapped_number()) return true;
  return holds(t.item(), dtype);
}
// The dtype in which a comparison reads its number. An integer is widened first, since its own dtype may be too narrow for it.
inline at::ScalarType compared(at::ScalarType common, at::ScalarType compute) { return at::isFloatingType(common) ? common : compute; }
// A number that is built into a graph, such as an `eps`. The values between the steps of a graph are rounded as well, so that it may lose
// as much as some of them. `Call::run` returns false for what it throws.
inline at::Scalar held(const at::Scalar& number, at::ScalarType dtype) {
  if (!holds(number, dtype, 4)) throw Unheld();
  return number;
}

template <class... How>
std::vector<Node> inputs_of(Graph& g, size_t& next, size_t count, How... how) {
  std::vector<Node> nodes;
  for (size_t i = 0; i < count; ++i) nodes.push_back(g.input(next++, how...));
  return nodes;
}

} // namespace shiplap::backend
