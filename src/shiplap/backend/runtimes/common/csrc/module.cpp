// The extension module `_C`: what Python may ask and set. Loading it registers the device.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <shiplap_backend/call.h>
#include <shiplap_backend/device.h>
#include <shiplap_backend/fallback.h>
#include <shiplap_backend/memory.h>

#include <mutex>

namespace py = pybind11;
using namespace shiplap::backend;

namespace {

constexpr const char* kPolicies[] = {"count", "warn", "error"};  // as the values of Policy

at::Generator default_host_generator() { return host_generator(std::nullopt); }

py::dict python_counters() {
  py::dict result;
  for (const auto& [op, counts] : counters()) {
    py::dict one;
    one["native"] = counts.native;
    one["fallback"] = counts.fallback;
    result[op.c_str()] = one;
  }
  return result;
}

void set_policy(const std::string& policy, std::vector<std::string> allowed) {
  for (uint8_t i = 0; i < std::size(kPolicies); ++i) {
    if (policy == kPolicies[i]) {
      return set_fallback_policy(static_cast<Policy>(i), std::move(allowed));
    }
  }
  throw py::value_error("fallback policy '" + policy + "': expected 'count', 'warn' or 'error'");
}

py::dict cache_info() {
  auto info = executables().info();
  py::dict d;
  d["entries"] = info.entries;
  d["capacity"] = info.capacity;
  d["hits"] = info.hits;
  d["misses"] = info.misses;
  d["evictions"] = info.evictions;
  d["compile_seconds"] = info.compile_seconds;
  return d;
}

py::dict memory() {
  auto stats = memory_stats();
  py::dict d;
  d["allocated"] = stats.allocated;
  d["peak"] = stats.peak;
  d["limit"] = stats.limit;
  d["allocations"] = stats.allocations;
  return d;
}

py::bytes rng_state() {
  auto generator = default_host_generator();
  std::lock_guard<std::mutex> lock(generator.mutex());
  auto state = generator.get_state();
  return {static_cast<const char*>(state.const_data_ptr()), static_cast<size_t>(state.numel())};
}

void set_rng_state(const py::bytes& bytes) {
  auto generator = default_host_generator();
  std::lock_guard<std::mutex> lock(generator.mutex());
  auto state = generator.get_state();
  std::string_view given = bytes;
  if (given.size() != static_cast<size_t>(state.numel())) {
    throw py::value_error("RNG state of " + std::to_string(given.size()) + " bytes: expected " +
                          std::to_string(state.numel()));
  }
  std::copy(given.begin(), given.end(), static_cast<char*>(state.mutable_data_ptr()));
  generator.set_state(state);
}

void manual_seed(uint64_t seed) {
  auto generator = default_host_generator();
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_current_seed(seed);
}

uint64_t seed() {
  auto generator = default_host_generator();
  std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.seed();
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  register_stand_ins();
  m.def("counters", &python_counters);
  m.def("reset_counters", &reset_counters);
  m.def("fallback_policy", [] { return kPolicies[static_cast<uint8_t>(fallback_policy())]; });
  m.def("allowed_fallbacks", &allowed_fallbacks);
  m.def("set_fallback_policy", &set_policy, py::arg("policy"),
        py::arg("allow") = std::vector<std::string>());
  m.def("cache_info", &cache_info);
  m.def("cache_clear", [] { executables().clear(); });
  m.def("cache_resize", [](size_t capacity) { executables().resize(capacity); });
  m.def("memory_stats", &memory);
  m.def("reset_peak_memory", &reset_peak_memory);
  m.def("set_memory_limit", &set_memory_limit);
  m.def("rng_state", &rng_state);
  m.def("set_rng_state", &set_rng_state);
  m.def("manual_seed", &manual_seed);
  m.def("seed", &seed);
  m.def("initial_seed", [] { return default_host_generator().current_seed(); });
  m.def("in_bad_fork", &in_bad_fork);
  m.def("layout", [] { return layout().last; });
  m.def("set_layout", [](int64_t last) { set_layout({last}); });
}
