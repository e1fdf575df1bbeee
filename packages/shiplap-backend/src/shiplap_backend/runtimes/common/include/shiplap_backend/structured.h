// ATen's own shape inference of structured ops, with outputs that already exist: `meta` decides sizes, strides and dtype, and the
// outputs are resized to it, as torch's own out= kernels do.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include <ATen/TensorIterator.h>
#include <ATen/TensorMeta.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_ops.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/resize_ops.h>
#include <torch/version.h>

namespace shiplap::backend {

// Until 2.12 the virtual functions of MetaBase carried dimension names.
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
#define SHIPLAP_NAMES_PARAMETER , at::DimnameList names
#define SHIPLAP_NAMES , names
#else
#define SHIPLAP_NAMES_PARAMETER
#define SHIPLAP_NAMES
#endif

inline void resize_like_meta(const at::Tensor& out, at::IntArrayRef sizes, at::IntArrayRef strides, at::TensorOptions options) {
  TORCH_CHECK(options.dtype() == out.dtype(), "Expected out tensor to have dtype ", options.dtype(), ", but got ", out.dtype(), " instead");
  TORCH_CHECK(options.device() == out.device(), "Expected out tensor to have device ", options.device(), ", but got ", out.device(), " instead");
  if (out.sizes().equals(sizes)) return;
  at::_ops::resize_::call(const_cast<at::Tensor&>(out), c10::fromIntArrayRefSlow(sizes), std::nullopt);  // `finish` warns
  if (!strides.empty()) {
    at::_ops::as_strided_::call(const_cast<at::Tensor&>(out), c10::fromIntArrayRefSlow(sizes), c10::fromIntArrayRefSlow(strides), std::nullopt);
  } else if (options.memory_format_opt().has_value()) {
    out.unsafeGetTensorImpl()->empty_tensor_restride(*options.memory_format_opt());
  }
}

// `Meta` is at::meta::structured_X; `N` its number of outputs.
template <class Meta, size_t N>
class Structured final : public Meta {
 public:
  template <class... Out>
  explicit Structured(const Out&... outs) : outs_{std::cref(static_cast<const at::Tensor&>(outs))...} {}

  void set_output_strided(int64_t i, at::IntArrayRef sizes, at::IntArrayRef strides, at::TensorOptions options SHIPLAP_NAMES_PARAMETER) override {
    remember(i);
    resize_like_meta(outs_[i], sizes, strides, options);
    if (!strides.empty() && outs_[i].get().strides() != strides) {
      proxies_[i] = at::empty_strided(sizes, strides, options);
    }
    announce(i, sizes, strides, options SHIPLAP_NAMES);
  }

  void set_output_raw_strided(int64_t i, at::IntArrayRef sizes, at::IntArrayRef strides, at::TensorOptions options SHIPLAP_NAMES_PARAMETER) override {
    remember(i);
    resize_like_meta(outs_[i], sizes, strides, options);
    announce(i, sizes, strides, options SHIPLAP_NAMES);
  }

  const at::Tensor& maybe_get_output(int64_t i) override {
    return proxies_[i].has_value() ? *proxies_[i] : outs_[i].get();
  }

  // Results that were written to a proxy reach the output. Torch's warning of a resized output is given here, and not
  // where it is resized: the `meta` of some losses makes the sizes of the inputs first, and then those of the result.
  void finish() {
    for (size_t i = 0; i < N; ++i) {
      if (before_[i].has_value()) {
        const std::vector<int64_t> strides(before_[i]->size());
        const auto then = at::empty_strided(*before_[i], strides, at::TensorOptions(at::kByte).device(at::kMeta));
        at::native::resize_output_check(then, outs_[i].get().sizes());
      }
      if (proxies_[i].has_value()) at::_ops::copy_::call(const_cast<at::Tensor&>(outs_[i].get()), *proxies_[i], false);
    }
  }

 private:
  // An iterator learns its operands from here.
  void announce(int64_t i, at::IntArrayRef sizes, at::IntArrayRef strides, at::TensorOptions options SHIPLAP_NAMES_PARAMETER) {
    if constexpr (std::is_base_of_v<at::TensorIteratorBase, Meta>) Meta::set_output_raw_strided(i, sizes, strides, options SHIPLAP_NAMES);
  }

  // The sizes of an output that has elements, before it is resized for the first time.
  void remember(int64_t i) {
    const at::Tensor& out = outs_[i];
    if (!before_[i].has_value() && out.numel() != 0) before_[i] = out.sizes().vec();
  }

  std::array<std::reference_wrapper<const at::Tensor>, N> outs_;
  std::array<std::optional<std::vector<int64_t>>, N> before_;
  std::array<std::optional<at::Tensor>, N> proxies_;
};

} // namespace shiplap::backend
