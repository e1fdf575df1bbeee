// Pooling, interpolation and padding along one dim: which inputs each output is made of, with weights. Where ATen has the arithmetic
// of an index, it is ATen's.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/native/AdaptivePooling.h>
#include <ATen/native/UpSample.h>

namespace shiplap::backend {

// For each output: (input, weight).
using Taps = std::vector<std::vector<std::pair<int64_t, float>>>;

// The inputs inside each window, in order.
inline Taps windows(int64_t n, int64_t out, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation) {
  Taps taps(out);
  for (int64_t o = 0; o < out; ++o) {
    for (int64_t k = 0; k < kernel; ++k) {
      auto i = o * stride - padding + k * dilation;
      if (i >= 0 && i < n) taps[o].emplace_back(i, 1.f);
    }
  }
  return taps;
}

// The same, weighted as average pooling does: by how much of the window lies in the input, or in the padded input. The divisor of an
// image is the product of those of its dims; `divided` is false where the caller gives another.
inline Taps averages(int64_t n, int64_t out, int64_t kernel, int64_t stride, int64_t padding, bool padding_counts, bool divided) {
  auto taps = windows(n, out, kernel, stride, padding, 1);
  for (int64_t o = 0; divided && o < out; ++o) {
    auto end = std::min(o * stride - padding + kernel, n + padding);
    auto count = padding_counts ? end - (o * stride - padding) : static_cast<int64_t>(taps[o].size());
    for (auto& tap : taps[o]) tap.second = 1.f / static_cast<float>(count);
  }
  return taps;
}

inline Taps adaptive(int64_t n, int64_t out, bool averaged) {
  Taps taps(out);
  for (int64_t o = 0; o < out; ++o) {
    auto begin = at::native::start_index(o, out, n), end = at::native::end_index(o, out, n);
    for (auto i = begin; i < end; ++i) taps[o].emplace_back(i, averaged ? 1.f / static_cast<float>(end - begin) : 1.f);
  }
  return taps;
}

inline Taps nearest(int64_t n, int64_t out, std::optional<double> scale, bool exact) {
  Taps taps(out);
  for (int64_t o = 0; o < out; ++o) {
    taps[o].emplace_back(exact ? at::native::nearest_exact_idx(o, n, out, scale) : at::native::nearest_idx(o, n, out, scale), 1.f);
  }
  return taps;
}

inline Taps linear(int64_t n, int64_t out, std::optional<double> scale, bool align_corners) {
  Taps taps(out);
  auto ratio = at::native::area_pixel_compute_scale<float>(n, out, align_corners, scale);
  for (int64_t o = 0; o < out; ++o) {
    int64_t i0 = 0, i1 = 0;
    float w0 = 1, w1 = 0;
    at::native::compute_source_index_and_lambda<float, float>(i0, i1, w0, w1, ratio, o, n, out, align_corners);
    taps[o] = {{i0, w0}, {i1, w1}};
  }
  return taps;
}

inline Taps cubic(int64_t n, int64_t out, std::optional<double> scale, bool align_corners) {
  Taps taps(out);
  auto ratio = at::native::area_pixel_compute_scale<float>(n, out, align_corners, scale);
  for (int64_t o = 0; o < out; ++o) {
    auto real = at::native::area_pixel_compute_source_index<float>(ratio, o, align_corners, /*cubic=*/true);
    int64_t i = 0;
    float t = 0, w[4];
    at::native::guard_index_and_lambda(real, n, i, t);
    at::native::get_cubic_upsample_coefficients<float>(w, t);
    for (int64_t k = 0; k < 4; ++k) taps[o].emplace_back(std::clamp<int64_t>(i - 1 + k, 0, n - 1), w[k]);
  }
  return taps;
}

// How `mode` reads one dim: nearest, exact, linear or cubic.
inline Taps interpolation(std::string_view mode, int64_t n, int64_t out, std::optional<double> scale, bool align_corners) {
  if (mode == "linear") return linear(n, out, scale, align_corners);
  return mode == "cubic" ? cubic(n, out, scale, align_corners) : nearest(n, out, scale, mode == "exact");
}

// Reflected at the borders, or the border's value repeated.
inline Taps beyond(int64_t n, int64_t left, int64_t right, bool reflected) {
  Taps taps(left + n + right);
  for (int64_t o = 0; o < left + n + right; ++o) {
    auto i = o - left, last = n - 1;
    taps[o].emplace_back(reflected ? (i < 0 ? -i : i > last ? 2 * last - i : i) : std::clamp<int64_t>(i, 0, last), 1.f);
  }
  return taps;
}

// Windows side by side: output `k * out + o`, or `o * kernel + k` if `inner`, is element k of window o.
inline Taps unfolded(int64_t n, int64_t out, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation, bool inner) {
  Taps taps(kernel * out);
  for (int64_t o = 0; o < out; ++o) {
    for (int64_t k = 0; k < kernel; ++k) {
      auto i = o * stride - padding + k * dilation;
      if (i >= 0 && i < n) taps[inner ? o * kernel + k : k * out + o].emplace_back(i, 1.f);
    }
  }
  return taps;
}

// Of the gradient: the outputs that each of the `n` inputs went into.
inline Taps reversed(const Taps& taps, int64_t n) {
  Taps back(n);
  for (size_t o = 0; o < taps.size(); ++o) {
    for (auto [i, w] : taps[o]) back[i].emplace_back(static_cast<int64_t>(o), w);
  }
  return back;
}

} // namespace shiplap::backend
