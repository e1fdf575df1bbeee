// The CPU in the device's place: runs an op there and says so. On the same memory if it is shared; otherwise arguments and
// results are copied.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>
#include <shiplap_backend/counters.h>

#include <string>
#include <vector>

namespace shiplap::backend {

enum class Policy : uint8_t { count, warn, error };

Policy fallback_policy();
std::vector<std::string> allowed_fallbacks();
// `allowed`: ops that may fall back under `error`, by name with or without overload
// ("aten::normal_", "aten::add.out").
void set_fallback_policy(Policy policy, std::vector<std::string> allowed);

// The global fallback: whatever has no kernel for the device. Views stay views, in-place ops and
// out= write to the device tensor, also where the CPU op enlarges it.
void boxed_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Gives the fallback to ops whose kernel for every device only raises, unless the device has a
// kernel of its own. Once, when all kernels are registered.
void register_stand_ins();

// The reason of the fallback that this thread is about to take; `boxed_fallback` takes it and
// leaves `unregistered`.
void announce(Why why, const char* detail);

namespace detail {
template <class Op, bool symint, class Schema>
struct Fallback;
template <class Op, bool symint, class R, class... A>
struct Fallback<Op, symint, R(A...)> {
  static R call(Why why, const char* detail,
                typename c10::maybe_keep_symint<symint, A>::type... args) {
    announce(why, detail);
    return at::native::_call_fallback_fn<&boxed_fallback, Op, symint, R(A...)>::call(
        std::forward<typename c10::maybe_keep_symint<symint, A>::type>(args)...);
  }
};
}  // namespace detail

// fallback<at::_ops::add_out>::call(Why::dtype, "self is Double", self, other, alpha, out)
template <class Op>
struct fallback : detail::Fallback<Op, false, typename Op::schema> {};
template <class Op>
struct fallback_symint : detail::Fallback<Op, true, typename Op::schema> {};

}  // namespace shiplap::backend
