// Bodies of row_kernels.h. Part of gemm_kernels_impl.h, so of internal linkage and compiled once per
// instruction set.
#ifndef SHIPLAP_SPARSE3D_ROW_KERNELS_IMPL_H_
#define SHIPLAP_SPARSE3D_ROW_KERNELS_IMPL_H_

#include "hit_mask.h"
#include "row_kernels.h"
#include "simd.h"

namespace shiplap::sparse3d {
namespace {

template <class S>
bool entries_in_range(const TableRows<S>& at) {
  EntryRange range;
  for (int64_t i = 0; i < at.rows; ++i) {
    for (int64_t tap = 0; tap < at.taps; tap += 64) {
      hit_mask(at.table + i * at.stride + tap, at.taps - tap < 64 ? at.taps - tap : 64, range);
    }
  }
  return range.largest() <= static_cast<uint64_t>(at.limit);
}

// Calls visit(tap, entry) for the hits of a table row, in the order of taps.
template <class S, class Visit>
inline void for_each_hit(const TableRows<S>& at, int64_t row, const Visit& visit) {
  EntryRange unused;
  const int32_t* entries = at.table + row * at.stride;
  for (int64_t tap = 0; tap < at.taps; tap += 64) {
    const int64_t width = at.taps - tap < 64 ? at.taps - tap : 64;
    for (uint64_t hits = hit_mask(entries + tap, width, unused); hits != 0; hits &= hits - 1) {
      const int v = static_cast<int>(tap) + __builtin_ctzll(hits);
      visit(v, entries[v]);
    }
  }
}

// V vectors of a row of which `left` channels are left; only a single vector may reach beyond them.
template <class S, int V>
struct Columns {
  using T = Sum<S>;
  using Vector = typename Simd<T>::Vector;
  static constexpr int64_t kLanes = Simd<T>::kLanes;
  int64_t left;

  bool whole() const { return V > 1 || left >= kLanes; }
  Vector load(const S* row, int v) const {
    return whole() ? load_sums(row + v * kLanes) : load_some(row, left);
  }
  void store(S* row, int v, Vector sums) const {
    whole() ? store_sums(row + v * kLanes, sums) : store_some(row, sums, left);
  }
};

// Splits the channels into pieces of 8, 4, 2 and 1 vectors, the last of them perhaps not whole.
template <class S, template <class, int> class Body, class Args, int V = 8>
inline void for_each_piece(const Args& args, int64_t row, int64_t column = 0) {
  constexpr int64_t kWidth = V * Simd<Sum<S>>::kLanes;
  for (; args.at.channels - column >= kWidth; column += kWidth) {
    Body<S, V>::run(args, row, column);
  }
  if constexpr (V > 1) {
    for_each_piece<S, Body, Args, V / 2>(args, row, column);
  } else if (column < args.at.channels) {
    Body<S, 1>::run(args, row, column);
  }
}

template <class S, int V>
struct DepthwisePiece {
  static void run(const Depthwise<S>& d, int64_t row, int64_t column) {
    const Columns<S, V> columns{d.at.channels - column};
    typename Columns<S, V>::Vector sums[V];
    SHIPLAP_UNROLL
    for (int v = 0; v < V; ++v) sums[v] = load_sums(d.bias + column + v * columns.kLanes);
    for_each_hit(d.at, row, [&](int tap, int64_t entry) {
      const S* from = d.at.feats + entry * d.at.channels + column;
      const Sum<S>* weight = d.weight + tap * d.weight_stride + column;
      SHIPLAP_UNROLL
      for (int v = 0; v < V; ++v) {
        sums[v] += load_sums(weight + v * columns.kLanes) * columns.load(from, v);
      }
    });
    SHIPLAP_UNROLL
    for (int v = 0; v < V; ++v) columns.store(d.out + row * d.at.channels + column, v, sums[v]);
  }
};

template <class S, int V>
struct DepthwiseGradPiece {
  static void run(const DepthwiseGrad<S>& d, int64_t row, int64_t column) {
    const Columns<S, V> columns{d.at.channels - column};
    typename Columns<S, V>::Vector grad[V];
    SHIPLAP_UNROLL
    for (int v = 0; v < V; ++v) grad[v] = columns.load(d.grad + row * d.at.channels + column, v);
    for_each_hit(d.at, row, [&](int tap, int64_t entry) {
      const S* from = d.at.feats + entry * d.at.channels + column;
      Sum<S>* sums = d.sums + tap * d.sums_stride + column;
      SHIPLAP_UNROLL
      for (int v = 0; v < V; ++v) {
        Simd<Sum<S>>::add_to(sums + v * columns.kLanes, grad[v] * columns.load(from, v));
      }
    });
  }
};

template <class S, int V>
struct SumPoolPiece {
  static void run(const SumPool<S>& p, int64_t row, int64_t column) {
    const Columns<S, V> columns{p.at.channels - column};
    typename Columns<S, V>::Vector sums[V] = {};
    int64_t hits = 0;
    for_each_hit(p.at, row, [&](int, int64_t entry) {
      ++hits;
      const S* from = p.at.feats + entry * p.at.channels + column;
      SHIPLAP_UNROLL
      for (int v = 0; v < V; ++v) sums[v] += columns.load(from, v);
    });
    const Sum<S> count = p.average && hits > 0 ? static_cast<Sum<S>>(hits) : Sum<S>(1);
    SHIPLAP_UNROLL
    for (int v = 0; v < V; ++v) {
      columns.store(p.out + row * p.at.channels + column, v, sums[v] / count);
    }
  }
};

// Integers as wide as a sum, one for each lane: what a comparison of two vectors gives.
template <class T>
struct Lanes {
  using Mask = decltype(typename Simd<T>::Vector{} < typename Simd<T>::Vector{});
  static constexpr int64_t kCount = Simd<T>::kLanes;
  typedef int16_t Taps __attribute__((vector_size(2 * kCount)));
  typedef int16_t UnalignedTaps __attribute__((vector_size(2 * kCount), aligned(2), may_alias));

  static Mask load(const int16_t* from, int64_t count) {
    if (count >= kCount) {
      const Taps taps = *reinterpret_cast<const UnalignedTaps*>(from);
      return __builtin_convertvector(taps, Mask);
    }
    Mask taps = {};
    for (int64_t i = 0; i < count; ++i) taps[i] = from[i];
    return taps;
  }
  static void store(int16_t* to, Mask taps, int64_t count) {
    if (count >= kCount) {
      *reinterpret_cast<UnalignedTaps*>(to) = __builtin_convertvector(taps, Taps);
      return;
    }
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<int16_t>(taps[i]);
  }
};

template <class S, int V>
struct MaxPoolPiece {
  static void run(const MaxPool<S>& p, int64_t row, int64_t column) {
    using Vector = typename Columns<S, V>::Vector;
    using L = Lanes<Sum<S>>;
    const Columns<S, V> columns{p.at.channels - column};
    Vector most[V] = {};
    typename L::Mask taps[V];
    SHIPLAP_UNROLL
    for (int v = 0; v < V; ++v) taps[v] = typename L::Mask{} - 1;
    for_each_hit(p.at, row, [&](int tap, int64_t entry) {
      const S* from = p.at.feats + entry * p.at.channels + column;
      SHIPLAP_UNROLL
      for (int v = 0; v < V; ++v) {
        const Vector value = columns.load(from, v);
        const auto first_nan = (value != value) & (most[v] == most[v]);
        const auto better = (taps[v] < 0) | (value > most[v]) | first_nan;
        most[v] = better ? value : most[v];
        taps[v] = better ? typename L::Mask{} + tap : taps[v];
      }
    });
    const int64_t at = row * p.at.channels + column;
    SHIPLAP_UNROLL
    for (int v = 0; v < V; ++v) {
      columns.store(p.out + at, v, most[v]);
      L::store(p.taps + at + v * L::kCount, taps[v], columns.left - v * L::kCount);
    }
  }
};

template <class S, int V>
struct MaxPoolGradPiece {
  static void run(const MaxPoolGrad<S>& p, int64_t row, int64_t column) {
    using Vector = typename Columns<S, V>::Vector;
    using L = Lanes<Sum<S>>;
    const Columns<S, V> columns{p.at.channels - column};
    Vector sums[V] = {};
    for_each_hit(p.at, row, [&](int tap, int64_t entry) {
      const int64_t at = entry * p.at.channels + column;
      SHIPLAP_UNROLL
      for (int v = 0; v < V; ++v) {
        const auto taps = L::load(p.taps + at + v * L::kCount, columns.left - v * L::kCount);
        sums[v] += taps == tap ? columns.load(p.at.feats + at, v) : Vector{};
      }
    });
    SHIPLAP_UNROLL
    for (int v = 0; v < V; ++v) columns.store(p.out + row * p.at.channels + column, v, sums[v]);
  }
};

template <class S, template <class, int> class Body, class Args>
bool over_rows(const Args& args) {
  if (!entries_in_range(args.at)) return false;
  for (int64_t row = 0; row < args.at.rows; ++row) for_each_piece<S, Body>(args, row);
  return true;
}

template <class S>
constexpr RowKernels<S> make_row_kernels() {
  return {over_rows<S, DepthwisePiece, Depthwise<S>>,
          over_rows<S, DepthwiseGradPiece, DepthwiseGrad<S>>,
          over_rows<S, SumPoolPiece, SumPool<S>>,
          over_rows<S, MaxPoolPiece, MaxPool<S>>,
          over_rows<S, MaxPoolGradPiece, MaxPoolGrad<S>>};
}

}  // namespace
}  // namespace shiplap::sparse3d

#endif  // SHIPLAP_SPARSE3D_ROW_KERNELS_IMPL_H_
