// The extension module `_C`: what Python may ask and set. Loading it registers the device. In
// Python's own C API, since a binding library would take longer to compile than all the rest.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <ATen/Context.h>
#include <c10/core/DeviceGuard.h>
#include <shiplap_backend/call.h>
#include <shiplap_backend/device.h>
#include <shiplap_backend/fallback.h>
#include <shiplap_backend/memory.h>
#include <torch/csrc/Generator.h>

#include <mutex>
#include <stdexcept>

namespace shiplap::backend {
namespace {

constexpr const char* kPolicies[] = {"count", "warn", "error"};  // as the values of Policy

// C++ exceptions become Python's.
template <PyObject* (*function)(PyObject*)>
PyObject* python(PyObject*, PyObject* arguments) {
  try {
    return function(arguments);
  } catch (const std::invalid_argument& e) {
    PyErr_SetString(PyExc_ValueError, e.what());
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
  }
  return nullptr;
}

PyObject* none() { return Py_NewRef(Py_None); }

void put(PyObject* dict, const char* key, PyObject* value) {
  PyDict_SetItemString(dict, key, value);
  Py_DECREF(value);
}

void put(PyObject* dict, const char* key, int64_t value) {
  put(dict, key, PyLong_FromLongLong(value));
}

PyObject* python_counters(PyObject*) {
  auto* all = PyDict_New();
  for (const auto& [op, counts] : counters()) {
    auto *one = PyDict_New(), *fallback = PyDict_New();
    put(one, "native", counts.native);
    for (const auto& [reason, calls] : counts.fallback) {
      put(fallback, reason.c_str(), calls);
    }
    put(one, "fallback", fallback);
    put(all, op.c_str(), one);
  }
  return all;
}

PyObject* python_reset_counters(PyObject*) {
  reset_counters();
  return none();
}

PyObject* policy(PyObject*) {
  return PyUnicode_FromString(kPolicies[static_cast<uint8_t>(fallback_policy())]);
}

PyObject* allowed(PyObject*) {
  auto* list = PyList_New(0);
  for (const auto& name : allowed_fallbacks()) {
    auto* text = PyUnicode_FromString(name.c_str());
    PyList_Append(list, text);
    Py_DECREF(text);
  }
  return list;
}

PyObject* set_policy(PyObject* arguments) {
  const char* chosen;
  PyObject* names;
  if (!PyArg_ParseTuple(arguments, "sO!", &chosen, &PyList_Type, &names)) {
    return nullptr;
  }
  std::vector<std::string> allow;
  for (Py_ssize_t i = 0; i < PyList_Size(names); ++i) {
    const char* name = PyUnicode_AsUTF8(PyList_GetItem(names, i));
    if (name == nullptr) {
      return nullptr;
    }
    allow.emplace_back(name);
  }
  for (uint8_t i = 0; i < std::size(kPolicies); ++i) {
    if (std::string_view(chosen) == kPolicies[i]) {
      set_fallback_policy(static_cast<Policy>(i), std::move(allow));
      return none();
    }
  }
  throw std::invalid_argument(std::string("fallback policy '") + chosen +
                              "': expected 'count', 'warn' or 'error'");
}

PyObject* cache_info(PyObject*) {
  auto info = executables().info();
  auto* d = PyDict_New();
  put(d, "entries", info.entries);
  put(d, "capacity", info.capacity);
  put(d, "bytes", info.bytes);
  put(d, "limit", info.limit);
  put(d, "hits", info.hits);
  put(d, "misses", info.misses);
  put(d, "evictions", info.evictions);
  put(d, "compile_seconds", PyFloat_FromDouble(info.compile_seconds));
  return d;
}

PyObject* cache_clear(PyObject*) {
  executables().clear();
  return none();
}

PyObject* cache_resize(PyObject* arguments) {
  Py_ssize_t capacity;
  long long bytes;
  if (!PyArg_ParseTuple(arguments, "nL", &capacity, &bytes)) {
    return nullptr;
  }
  executables().resize(static_cast<size_t>(capacity), bytes);
  return none();
}

// The argument of a function that takes an index of a device only; -1 is the current one.
c10::DeviceIndex index_in(PyObject* argument) {
  auto index = PyLong_AsLong(argument);
  TORCH_CHECK(index >= -1 && index <= INT8_MAX, "device index ", index, " is out of range");
  check_index(static_cast<c10::DeviceIndex>(index));
  return static_cast<c10::DeviceIndex>(index);
}

PyObject* memory(PyObject* index) {
  auto at = index_in(index);
  auto stats = memory_stats(at);
  auto [free, total] = memory_info(at < 0 ? current_index() : at);
  auto* d = PyDict_New();
  put(d, "allocated", stats.allocated);
  put(d, "peak", stats.peak);
  put(d, "limit", stats.limit);
  put(d, "allocations", stats.allocations);
  put(d, "reserved", stats.reserved);
  put(d, "free", static_cast<int64_t>(free));
  put(d, "total", static_cast<int64_t>(total));
  return d;
}

PyObject* reset_peak(PyObject* index) {
  reset_peak_memory(index_in(index));
  return none();
}

PyObject* set_limit(PyObject* arguments) {
  long long bytes;
  PyObject* index;
  if (!PyArg_ParseTuple(arguments, "OL", &index, &bytes)) {
    return nullptr;
  }
  set_memory_limit(index_in(index), bytes);
  return none();
}

PyObject* empty_kept(PyObject*) {
  empty_cache();
  return none();
}

PyObject* is_discrete(PyObject*) { return PyBool_FromLong(kDiscrete); }
PyObject* count_devices(PyObject*) { return PyLong_FromLong(device_count()); }

// Calls `f` with the generator of a device, which is locked meanwhile.
template <class F>
auto with_generator(PyObject* index, F f) {
  const c10::DeviceGuard guard({kDeviceType, index_in(index)});
  auto generator = host_generator(std::nullopt);
  std::lock_guard<std::mutex> lock(generator.mutex());
  return f(generator);
}

PyObject* rng_state(PyObject* index) {
  auto state = with_generator(index, [](at::Generator& g) { return g.get_state(); });
  return PyBytes_FromStringAndSize(static_cast<const char*>(state.const_data_ptr()), state.numel());
}

PyObject* set_rng_state(PyObject* arguments) {
  const char* given;
  Py_ssize_t size;
  PyObject* index;
  if (!PyArg_ParseTuple(arguments, "Oy#", &index, &given, &size)) {
    return nullptr;
  }
  with_generator(index, [&](at::Generator& g) {
    auto state = g.get_state();
    if (size != state.numel()) {
      throw std::invalid_argument("RNG state of " + std::to_string(size) + " bytes: expected " +
                                  std::to_string(state.numel()));
    }
    std::copy(given, given + size, static_cast<char*>(state.mutable_data_ptr()));
    g.set_state(state);
  });
  return none();
}

PyObject* manual_seed(PyObject* arguments) {
  unsigned long long seed;
  PyObject* index;
  if (!PyArg_ParseTuple(arguments, "OK", &index, &seed)) {
    return nullptr;
  }
  with_generator(index, [&](at::Generator& g) { g.set_current_seed(seed); });
  return none();
}

PyObject* seed(PyObject* index) {
  return PyLong_FromUnsignedLongLong(
      with_generator(index, [](at::Generator& g) { return g.seed(); }));
}

PyObject* initial_seed(PyObject* index) {
  return PyLong_FromUnsignedLongLong(
      with_generator(index, [](at::Generator& g) { return g.current_seed(); }));
}

PyObject* settle(PyObject*) {
  auto* state = PyEval_SaveThread();
  try {
    settle_autograd();
  } catch (const std::exception&) {  // a device that fails: the process ends anyway
  }
  PyEval_RestoreThread(state);
  return none();
}

PyObject* python_generator(PyObject* index) {
  return THPGenerator_Wrap(
      at::globalContext().defaultGenerator(c10::Device(kDeviceType, index_in(index))));
}

PyObject* bad_fork_now(PyObject*) { return PyBool_FromLong(in_bad_fork()); }

PyObject* get_layout(PyObject*) { return PyLong_FromLongLong(layout().last); }

PyObject* change_layout(PyObject* arguments) {
  long long last;
  if (!PyArg_ParseTuple(arguments, "L", &last)) {
    return nullptr;
  }
  set_layout({last});
  return none();
}

PyMethodDef methods[] = {
    {"counters", python<python_counters>, METH_NOARGS, nullptr},
    {"reset_counters", python<python_reset_counters>, METH_NOARGS, nullptr},
    {"fallback_policy", python<policy>, METH_NOARGS, nullptr},
    {"allowed_fallbacks", python<allowed>, METH_NOARGS, nullptr},
    {"set_fallback_policy", python<set_policy>, METH_VARARGS, nullptr},
    {"cache_info", python<cache_info>, METH_NOARGS, nullptr},
    {"cache_clear", python<cache_clear>, METH_NOARGS, nullptr},
    {"cache_resize", python<cache_resize>, METH_VARARGS, nullptr},
    {"memory_stats", python<memory>, METH_O, nullptr},
    {"reset_peak_memory", python<reset_peak>, METH_O, nullptr},
    {"set_memory_limit", python<set_limit>, METH_VARARGS, nullptr},
    {"rng_state", python<rng_state>, METH_O, nullptr},
    {"set_rng_state", python<set_rng_state>, METH_VARARGS, nullptr},
    {"manual_seed", python<manual_seed>, METH_VARARGS, nullptr},
    {"seed", python<seed>, METH_O, nullptr},
    {"initial_seed", python<initial_seed>, METH_O, nullptr},
    {"empty_cache", python<empty_kept>, METH_NOARGS, nullptr},
    {"discrete", python<is_discrete>, METH_NOARGS, nullptr},
    {"device_count", python<count_devices>, METH_NOARGS, nullptr},
    {"in_bad_fork", python<bad_fork_now>, METH_NOARGS, nullptr},
    {"default_generator", python<python_generator>, METH_O, nullptr},
    {"settle_autograd", python<settle>, METH_NOARGS, nullptr},
    {"layout", python<get_layout>, METH_NOARGS, nullptr},
    {"set_layout", python<change_layout>, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "_C",
                          "The device core.",
                          -1,
                          methods,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr};

}  // namespace
}  // namespace shiplap::backend

PyMODINIT_FUNC PyInit__C() {
  try {
    shiplap::backend::register_stand_ins();
    shiplap::backend::join_autograd();
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_ImportError, e.what());
    return nullptr;
  }
  return PyModule_Create(&shiplap::backend::definition);
}
