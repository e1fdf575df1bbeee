// Included by gemm_kernels_<isa>.cpp only, after they define
//   SHIPLAP_VECTOR_BYTES   16, 32 or 64
//   SHIPLAP_REGISTERS      how many vector registers the instruction set has
// and compiled with that instruction set's flags. Uses no library code (see gemm_kernels.h).
#include "gemm_kernels.h"
#include "hit_mask.h"
#include "row_kernels_impl.h"
#include "simd.h"

#include "hit_columns.h"

namespace shiplap::sparse3d {
namespace {

// Rows of the register block for a panel of V vectors: R * V sums, V operands and a broadcast
// value have to fit the registers, and R * V >= 8 sums hide the latency of a fused multiply-add.
constexpr int kMaxRows = 12;
// A block of outer products reads all its rows through one pointer, so a panel of one vector may have more of them.
constexpr int kMaxOuterRows = 16;
constexpr int block_rows(int vectors, int most = kMaxRows) {
  const int fitting = (SHIPLAP_REGISTERS - 1 - vectors) / vectors;
  return fitting < most ? fitting : most;
}

constexpr int kMaxPanel = SHIPLAP_REGISTERS >= 32 ? 4 : 2;

// Vectors of weights that fit the registers beside the sums of a few hits.
constexpr int kHeld = SHIPLAP_REGISTERS / 2;

// Gathered rows arrive from anywhere; ask for the first lines of a row ahead of its use, the
// hardware follows a longer row by itself.
constexpr int64_t kLine = 64, kPrefetchBytes = 512;

inline void prefetch_row(const void* row, int64_t bytes) {
  const char* line = static_cast<const char*>(row);
  const char* end = line + (bytes < kPrefetchBytes ? bytes : kPrefetchBytes);
  for (; line < end; line += kLine) __builtin_prefetch(line);
}

// Splits `total` into groups of at most Most rows that differ by at most one (two blocks of
// 7 and 6 keep the pipeline fuller than one of 12 and one of 1) and calls Body<R>::run(args,
// first) for each.
template <int R, template <int> class Body, class Args>
inline void run_group(const Args& args, int64_t first, int64_t size) {
  if (size == R) return Body<R>::run(args, first);
  if constexpr (R > 1) run_group<R - 1, Body>(args, first, size);
}

template <int Most, template <int> class Body, class Args>
inline void run_groups(const Args& args, int64_t total) {
  const int64_t groups = (total + Most - 1) / Most;
  if (groups == 0) return;
  const int64_t size = total / groups, larger = total % groups;
  int64_t first = 0;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t rows = size + (group < larger);
    run_group<Most, Body>(args, first, rows);
    first += rows;
  }
}

template <class T, int V, int R>
void gather_gemm_rows(const GatherGemm<T>& g, int64_t first) {
  using S = Simd<T>;
  const T* rows[R];
  T* tile[R];
  SHIPLAP_UNROLL
  for (int r = 0; r < R; ++r) {
    rows[r] = g.feats + g.hits[first + r].from * g.feats_stride;
    tile[r] = g.tile + g.hits[first + r].to * g.tile_stride;
    if (first + R + r < g.count) {
      prefetch_row(g.feats + g.hits[first + R + r].from * g.feats_stride,
                   g.depth * static_cast<int64_t>(sizeof(T)));
    }
  }
  const T* panel = g.panel;
  for (int64_t column = 0; column < g.panels * V * S::kLanes; column += V * S::kLanes) {
    // Sums of one tap start at zero and are added to the tile at the end: as fast as continuing
    // the tile's sums, and the rounding error of long channel sums stays short.
    typename S::Vector sums[R][V] = {};
    for (int64_t c = 0; c < g.depth; ++c, panel += V * S::kLanes) {
      typename S::Vector weights[V];
      SHIPLAP_UNROLL
      for (int v = 0; v < V; ++v) weights[v] = S::load(panel + v * S::kLanes);
      SHIPLAP_UNROLL
      for (int r = 0; r < R; ++r) {
        SHIPLAP_UNROLL
        for (int v = 0; v < V; ++v) sums[r][v] += weights[v] * rows[r][c];
      }
    }
    SHIPLAP_UNROLL
    for (int r = 0; r < R; ++r) {
      SHIPLAP_UNROLL
      for (int v = 0; v < V; ++v) S::add_to(tile[r] + column + v * S::kLanes, sums[r][v]);
    }
  }
}

// R hits from `hit` on, times weights in registers.
template <class T, int V, int D, int R>
inline void multiply_held(const GatherGemm<T>& g, const typename Simd<T>::Vector (&weights)[D][V],
                          const Hit* hit) {
  using S = Simd<T>;
  const T* rows[R];
  SHIPLAP_UNROLL
  for (int r = 0; r < R; ++r) rows[r] = g.feats + hit[r].from * g.feats_stride;
  typename S::Vector sums[R][V] = {};
  SHIPLAP_UNROLL
  for (int c = 0; c < D; ++c) {
    SHIPLAP_UNROLL
    for (int r = 0; r < R; ++r) {
      SHIPLAP_UNROLL
      for (int v = 0; v < V; ++v) sums[r][v] += weights[c][v] * rows[r][c];
    }
  }
  SHIPLAP_UNROLL
  for (int r = 0; r < R; ++r) {
    T* to = g.tile + hit[r].to * g.tile_stride;
    SHIPLAP_UNROLL
    for (int v = 0; v < V; ++v) S::add_to(to + v * S::kLanes, sums[r][v]);
  }
}

// One panel of D rows that stays in registers while all hits pass: few channels are multiplied in less time than a
// register block of hits takes to set up.
template <class T, int V, int D>
void gather_gemm_held(const GatherGemm<T>& held) {
  using S = Simd<T>;
  constexpr int kTogether = 8 / V;  // sums that do not wait for each other hide the latency
  const GatherGemm<T> g = held;     // vector stores may alias it
  typename S::Vector weights[D][V];
  SHIPLAP_UNROLL
  for (int c = 0; c < D; ++c) {
    SHIPLAP_UNROLL
    for (int v = 0; v < V; ++v) weights[c][v] = S::load(g.panel + (c * V + v) * S::kLanes);
  }
  const Hit *hit = g.hits, *const end = hit + g.count;
  for (; end - hit >= kTogether; hit += kTogether) multiply_held<T, V, D, kTogether>(g, weights, hit);
  for (; end - hit >= 2; hit += 2) multiply_held<T, V, D, 2>(g, weights, hit);
  if (hit != end) multiply_held<T, V, D, 1>(g, weights, hit);
}

#if defined(__AVX512BF16__)
template <int V, int R>
void gather_pairs_rows(const GatherPairs& g, int64_t first) {
  const Bfloat16* rows[R];
  float* tile[R];
  SHIPLAP_UNROLL
  for (int r = 0; r < R; ++r) {
    rows[r] = g.feats + g.hits[first + r].from * g.feats_stride;
    tile[r] = g.tile + g.hits[first + r].to * g.tile_stride;
    if (first + R + r < g.count) {
      prefetch_row(g.feats + g.hits[first + R + r].from * g.feats_stride,
                   g.depth * static_cast<int64_t>(sizeof(Bfloat16)));
    }
  }
  const Bfloat16* panel = g.panel;
  for (int64_t column = 0; column < g.panels * V * kFloats; column += V * kFloats) {
    Floats sums[R][V] = {};
    for (int64_t c = 0; c < g.depth; c += 2, panel += 2 * V * kFloats) {
      Words weights[V];
      SHIPLAP_UNROLL
      for (int v = 0; v < V; ++v) weights[v] = load_pairs(panel + 2 * v * kFloats);
      SHIPLAP_UNROLL
      for (int r = 0; r < R; ++r) {
        const Words pair = spread_pair(rows[r] + c);
        SHIPLAP_UNROLL
        for (int v = 0; v < V; ++v) {
          sums[r][v] = dot_pairs(sums[r][v], pair, weights[v]);
        }
      }
    }
    SHIPLAP_UNROLL
    for (int r = 0; r < R; ++r) {
      SHIPLAP_UNROLL
      for (int v = 0; v < V; ++v) {
        Simd<float>::add_to(tile[r] + column + v * kFloats, sums[r][v]);
      }
    }
  }
}
#endif  // __AVX512BF16__

template <class T, int V, int R>
void outer_sum_rows(const OuterSum<T>& o, int64_t first) {
  using S = Simd<T>;
  const T* left = o.left + first;
  const T* right = o.right;
  typename S::Vector sums[R][V] = {};
  for (int64_t i = 0; i < o.count; ++i, left += o.left_stride, right += o.right_stride) {
    typename S::Vector columns[V];
    SHIPLAP_UNROLL
    for (int v = 0; v < V; ++v) columns[v] = S::load(right + v * S::kLanes);
    SHIPLAP_UNROLL
    for (int r = 0; r < R; ++r) {
      SHIPLAP_UNROLL
      for (int v = 0; v < V; ++v) sums[r][v] += columns[v] * left[r];
    }
  }
  SHIPLAP_UNROLL
  for (int r = 0; r < R; ++r) {
    T* out = o.sums + (first + r) * o.sums_stride;
    SHIPLAP_UNROLL
    for (int v = 0; v < V; ++v) S::add_to(out + v * S::kLanes, sums[r][v]);
  }
}

template <class T, int V, int R>
void gather_outer_rows(const GatherOuter<T>& o, int64_t first) {
  using S = Simd<T>;
  const T* const left = o.left + first;
  const T* const right = o.right;
  const int64_t left_stride = o.left_stride, right_stride = o.right_stride;
  const int32_t *from = o.left_index, *to = o.right_index;
  const int32_t* const end = from + 2 * o.count;
  typename S::Vector sums[R][V] = {};
  for (; from != end; from += 2, to += 2) {
    const T* values = left + *from * left_stride;
    const T* row = right + *to * right_stride;
    typename S::Vector columns[V];
    SHIPLAP_UNROLL
    for (int v = 0; v < V; ++v) columns[v] = S::load(row + v * S::kLanes);
    SHIPLAP_UNROLL
    for (int r = 0; r < R; ++r) {
      SHIPLAP_UNROLL
      for (int v = 0; v < V; ++v) sums[r][v] += columns[v] * values[r];
    }
  }
  SHIPLAP_UNROLL
  for (int r = 0; r < R; ++r) {
    T* out = o.sums + (first + r) * o.sums_stride;
    SHIPLAP_UNROLL
    for (int v = 0; v < V; ++v) S::add_to(out + v * S::kLanes, sums[r][v]);
  }
}

#if defined(__AVX512BF16__)
template <int V>
struct PairsPanel {
  template <int R>
  struct Gather {
    static void run(const GatherPairs& g, int64_t first) { gather_pairs_rows<V, R>(g, first); }
  };

  static void gather(const GatherPairs& g) { run_groups<block_rows(V), Gather>(g, g.count); }
};
#endif

template <class T, int V>
struct Panel {
  template <int R>
  struct Gather {
    static void run(const GatherGemm<T>& g, int64_t first) { gather_gemm_rows<T, V, R>(g, first); }
  };
  template <int R>
  struct Outer {
    static void run(const OuterSum<T>& o, int64_t first) { outer_sum_rows<T, V, R>(o, first); }
  };

  template <int R>
  struct GatheredOuter {
    static void run(const GatherOuter<T>& o, int64_t first) { gather_outer_rows<T, V, R>(o, first); }
  };

  static void gather_gemm(const GatherGemm<T>& g) {
    if (g.panels == 1) {
      if (kHeld >= 4 * V && g.depth == 4) return gather_gemm_held<T, V, 4>(g);
      if (kHeld >= 8 * V && g.depth == 8) return gather_gemm_held<T, V, 8>(g);
      if (kHeld >= 16 * V && g.depth == 16) return gather_gemm_held<T, V, 16>(g);
    }
    run_groups<block_rows(V), Gather>(g, g.count);
  }
  static void gather_outer(const GatherOuter<T>& o) {
    run_groups<block_rows(V, kMaxOuterRows), GatheredOuter>(o, o.rows);
  }
  static void outer_sum(const OuterSum<T>& o) {
    run_groups<block_rows(V, kMaxOuterRows), Outer>(o, o.rows);
  }
};

// Rows that are V whole vectors, as at the usual channel counts: no loop within a row.
template <class S, int V>
void gather_whole_rows(const GatherRows<S>& g) {
  constexpr int64_t kLanes = Simd<Sum<S>>::kLanes, kColumns = V * kLanes, kAhead = 16;  // rows
  const GatherRows<S> local = g;  // vector stores may alias `g`
  const int32_t* index = local.index;
  const int32_t* const ahead_end = index + 2 * (local.count - kAhead);
  const int32_t* const end = index + 2 * local.count;
  for (Sum<S>* out = local.out; index != end; index += 2, out += kColumns) {
    const S* row = local.rows + *index * kColumns;
    if (index < ahead_end) {
      const S* ahead = local.rows + index[2 * kAhead] * kColumns;
      SHIPLAP_UNROLL
      for (int64_t line = 0; line < kColumns * int64_t{sizeof(S)}; line += kLine) {
        __builtin_prefetch(reinterpret_cast<const char*>(ahead) + line);
      }
    }
    SHIPLAP_UNROLL
    for (int v = 0; v < V; ++v) store_sums(out + v * kLanes, load_sums(row + v * kLanes));
  }
}

template <class S>
void gather_rows(const GatherRows<S>& g) {
  constexpr int64_t kLanes = Simd<Sum<S>>::kLanes;
  if (g.columns == g.out_stride) {
    if (g.columns == 2 * kLanes) return gather_whole_rows<S, 2>(g);
    if (g.columns == 4 * kLanes) return gather_whole_rows<S, 4>(g);
    if (g.columns == 8 * kLanes) return gather_whole_rows<S, 8>(g);
  }
  Sum<S>* out = g.out;
  for (int64_t i = 0; i < g.count; ++i, out += g.out_stride) {
    const S* row = g.rows + g.index[2 * i] * g.columns;
    int64_t c = 0;
    for (; c + kLanes <= g.columns; c += kLanes) store_sums(out + c, load_sums(row + c));
    for (; c < g.columns; ++c) out[c] = widen(row[c]);
    for (; c < g.out_stride; ++c) out[c] = Sum<S>(0);
  }
}

template <class S>
void store_rows(const StoreRows<S>& s) {
  constexpr int64_t kLanes = Simd<Sum<S>>::kLanes;
  for (int64_t i = 0; i < s.count; ++i) {
    const Sum<S>* row = s.rows + i * s.stride;
    S* out = s.out + i * s.out_stride;
    int64_t c = 0;
    for (; c + kLanes <= s.columns; c += kLanes) store_sums(out + c, load_sums(row + c));
    for (; c < s.columns; ++c) narrow(row[c], out + c);
  }
}

bool collect_hits(const CollectHits& c) {
#if defined(__AVX512F__)
  return collect_hit_columns(c);
#else
  EntryRange range;
  const int32_t* row = c.table;
  for (int64_t i = 0; i < c.rows; ++i, row += c.table_stride) {
    for (int64_t tap = 0; tap < c.taps; tap += 64) {
      const int64_t width = c.taps - tap < 64 ? c.taps - tap : 64;
      // Walking the set bits mispredicts about once a row; a branch on each entry would once a hit.
      for (uint64_t hits = hit_mask(row + tap, width, range); hits != 0; hits &= hits - 1) {
        const int64_t v = tap + __builtin_ctzll(hits);
        c.lists[v * c.list_stride + c.counts[v]++] = Hit{row[v], static_cast<int32_t>(i)};
      }
    }
  }
  return range.largest() <= static_cast<uint64_t>(c.limit);
#endif
}

template <class T>
constexpr GemmKernels<T> make_gemm_kernels() {
  GemmKernels<T> kernels{Simd<T>::kLanes, kMaxPanel, {}, {}, {}};
  kernels.gather_gemm[0] = Panel<T, 1>::gather_gemm;
  kernels.gather_gemm[1] = Panel<T, 2>::gather_gemm;
  kernels.outer_sum[0] = Panel<T, 1>::outer_sum;
  kernels.gather_outer[0] = Panel<T, 1>::gather_outer;
  kernels.outer_sum[1] = Panel<T, 2>::outer_sum;
  kernels.gather_outer[1] = Panel<T, 2>::gather_outer;
  if constexpr (kMaxPanel == 4) {
    kernels.gather_gemm[2] = Panel<T, 3>::gather_gemm;
    kernels.gather_gemm[3] = Panel<T, 4>::gather_gemm;
    kernels.outer_sum[2] = Panel<T, 3>::outer_sum;
    kernels.gather_outer[2] = Panel<T, 3>::gather_outer;
    kernels.outer_sum[3] = Panel<T, 4>::outer_sum;
    kernels.gather_outer[3] = Panel<T, 4>::gather_outer;
  }
  return kernels;
}

template <class S>
constexpr StorageKernels<S> make_storage_kernels() {
  return {gather_rows<S>, store_rows<S>, make_row_kernels<S>()};
}

constexpr IsaKernels kKernels{
    collect_hits,
    make_gemm_kernels<float>(),
    make_gemm_kernels<double>(),
    make_storage_kernels<float>(),
    make_storage_kernels<double>(),
    make_storage_kernels<Half>(),
    make_storage_kernels<Bfloat16>(),
#if defined(__AVX512BF16__)
    {PairsPanel<1>::gather, PairsPanel<2>::gather, PairsPanel<3>::gather, PairsPanel<4>::gather},
#else
    {},
#endif
};

}  // namespace
}  // namespace shiplap::sparse3d
