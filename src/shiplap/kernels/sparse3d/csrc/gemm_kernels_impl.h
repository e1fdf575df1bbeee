// Included by gemm_kernels_<isa>.cpp only, after they define
//   SHIPLAP_VECTOR_BYTES   16, 32 or 64
//   SHIPLAP_REGISTERS      how many vector registers the instruction set has
// and compiled with that instruction set's flags. Uses no library code (see gemm_kernels.h).
#include "gemm_kernels.h"
#include "hit_mask.h"

// Every loop over rows or vectors of a register block is unrolled whole: one that is not would
// index the sums at run time and so keep them in memory.
#define SHIPLAP_UNROLL _Pragma("GCC unroll 16")

namespace shiplap::sparse3d {
namespace {

template <class T>
struct Simd {
  typedef T Vector __attribute__((vector_size(SHIPLAP_VECTOR_BYTES)));
  typedef T Unaligned __attribute__((vector_size(SHIPLAP_VECTOR_BYTES), aligned(alignof(T)),
                                     may_alias));
  static constexpr int64_t kLanes = SHIPLAP_VECTOR_BYTES / sizeof(T);

  static Vector load(const T* from) { return *reinterpret_cast<const Unaligned*>(from); }
  static void store(T* to, Vector value) { *reinterpret_cast<Unaligned*>(to) = value; }
  static void add_to(T* to, Vector value) { store(to, load(to) + value); }
};

// Rows of the register block for a panel of V vectors: R * V sums, V operands and a broadcast
// value have to fit the registers, and R * V >= 8 sums hide the latency of a fused multiply-add.
constexpr int kMaxRows = 12;
constexpr int block_rows(int vectors) {
  const int fitting = (SHIPLAP_REGISTERS - 1 - vectors) / vectors;
  return fitting < kMaxRows ? fitting : kMaxRows;
}

constexpr int kMaxPanel = SHIPLAP_REGISTERS >= 32 ? 4 : 2;

// Gathered rows arrive from anywhere; ask for the first lines of a row ahead of its use, the
// hardware follows a longer row by itself.
constexpr int64_t kLine = 64, kPrefetchBytes = 512;

inline void prefetch_row(const void* row, int64_t bytes) {
  const char* line = static_cast<const char*>(row);
  const char* end = line + (bytes < kPrefetchBytes ? bytes : kPrefetchBytes);
  for (; line < end; line += kLine) __builtin_prefetch(line);
}

// Splits `total` into groups of at most block_rows(V) that differ by at most one (two blocks of
// 7 and 6 keep the pipeline fuller than one of 12 and one of 1) and calls Body<R>::run(args,
// first) for each.
template <int V, template <int> class Body, class Args, int R = block_rows(V)>
inline void run_group(const Args& args, int64_t first, int64_t size) {
  if (size == R) return Body<R>::run(args, first);
  if constexpr (R > 1) run_group<V, Body, Args, R - 1>(args, first, size);
}

template <int V, template <int> class Body, class Args>
inline void run_groups(const Args& args, int64_t total) {
  const int64_t groups = (total + block_rows(V) - 1) / block_rows(V);
  if (groups == 0) return;
  const int64_t size = total / groups, larger = total % groups;
  int64_t first = 0;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t rows = size + (group < larger);
    run_group<V, Body>(args, first, rows);
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
    rows[r] = g.feats + g.hits[first + r].from * g.depth;
    tile[r] = g.tile + g.hits[first + r].to * g.tile_stride;
    if (first + R + r < g.count) {
      prefetch_row(g.feats + g.hits[first + R + r].from * g.depth,
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

  static void gather_gemm(const GatherGemm<T>& g) { run_groups<V, Gather>(g, g.count); }
  static void outer_sum(const OuterSum<T>& o) { run_groups<V, Outer>(o, o.rows); }
};

// Rows that are V whole vectors, as at the usual channel counts: no loop within a row.
template <class T, int V>
void gather_whole_rows(const GatherRows<T>& g) {
  using S = Simd<T>;
  constexpr int64_t kColumns = V * S::kLanes, kAhead = 16;  // rows
  const GatherRows<T> local = g;  // vector stores may alias `g`
  const int32_t* index = local.index;
  const int32_t* const ahead_end = index + 2 * (local.count - kAhead);
  const int32_t* const end = index + 2 * local.count;
  for (T* out = local.out; index != end; index += 2, out += kColumns) {
    const T* row = local.rows + *index * kColumns;
    if (index < ahead_end) {
      const T* ahead = local.rows + index[2 * kAhead] * kColumns;
      SHIPLAP_UNROLL
      for (int line = 0; line < V * SHIPLAP_VECTOR_BYTES; line += kLine) {
        __builtin_prefetch(reinterpret_cast<const char*>(ahead) + line);
      }
    }
    SHIPLAP_UNROLL
    for (int v = 0; v < V; ++v) S::store(out + v * S::kLanes, S::load(row + v * S::kLanes));
  }
}

template <class T>
void gather_rows(const GatherRows<T>& g) {
  constexpr int64_t kLanes = Simd<T>::kLanes;
  if (g.columns == g.out_stride) {
    if (g.columns == 2 * kLanes) return gather_whole_rows<T, 2>(g);
    if (g.columns == 4 * kLanes) return gather_whole_rows<T, 4>(g);
    if (g.columns == 8 * kLanes) return gather_whole_rows<T, 8>(g);
  }
  T* out = g.out;
  for (int64_t i = 0; i < g.count; ++i, out += g.out_stride) {
    const T* row = g.rows + g.index[2 * i] * g.columns;
    for (int64_t c = 0; c < g.columns; ++c) out[c] = row[c];
    for (int64_t c = g.columns; c < g.out_stride; ++c) out[c] = T(0);
  }
}

bool collect_hits(const CollectHits& c) {
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
}

template <class T>
constexpr GemmKernels<T> make_kernels() {
  GemmKernels<T> kernels{Simd<T>::kLanes, kMaxPanel, gather_rows<T>, {}, {}};
  kernels.gather_gemm[0] = Panel<T, 1>::gather_gemm;
  kernels.gather_gemm[1] = Panel<T, 2>::gather_gemm;
  kernels.outer_sum[0] = Panel<T, 1>::outer_sum;
  kernels.outer_sum[1] = Panel<T, 2>::outer_sum;
  if constexpr (kMaxPanel == 4) {
    kernels.gather_gemm[2] = Panel<T, 3>::gather_gemm;
    kernels.gather_gemm[3] = Panel<T, 4>::gather_gemm;
    kernels.outer_sum[2] = Panel<T, 3>::outer_sum;
    kernels.outer_sum[3] = Panel<T, 4>::outer_sum;
  }
  return kernels;
}

constexpr IsaKernels kKernels{collect_hits, make_kernels<float>(), make_kernels<double>()};

}  // namespace
}  // namespace shiplap::sparse3d
