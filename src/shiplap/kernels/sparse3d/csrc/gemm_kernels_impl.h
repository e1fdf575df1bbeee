// Included by gemm_kernels_<isa>.cpp only, after they define
//   SHIPLAP_VECTOR_BYTES   16, 32 or 64
//   SHIPLAP_REGISTERS      how many vector registers the instruction set has
// and compiled with that instruction set's flags. Uses no library code (see gemm_kernels.h).
#include "gemm_kernels.h"

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
};

// Rows of the register block for a panel of V vectors: R * V sums, V operands and a broadcast
// value have to fit the registers, and R * V >= 8 sums hide the latency of a fused multiply-add.
constexpr int kMaxRows = 12;
constexpr int block_rows(int vectors) {
  const int fitting = (SHIPLAP_REGISTERS - 1 - vectors) / vectors;
  return fitting < kMaxRows ? fitting : kMaxRows;
}

constexpr int kMaxPanel = SHIPLAP_REGISTERS >= 32 ? 4 : 2;

// Gathered rows arrive from anywhere; ask for the first lines of a row one group ahead, the
// hardware follows a longer row by itself.
constexpr int64_t kLine = 64, kPrefetchBytes = 512;

inline void prefetch_row(const void* row, int64_t bytes) {
  const char* line = static_cast<const char*>(row);
  const char* end = line + (bytes < kPrefetchBytes ? bytes : kPrefetchBytes);
  for (; line < end; line += kLine) __builtin_prefetch(line);
}

template <class T, int V, int R>
void gather_gemm_rows(const GatherGemm<T>& g, int64_t first) {
  using S = Simd<T>;
  const T* rows[R];
  SHIPLAP_UNROLL
  for (int r = 0; r < R; ++r) {
    rows[r] = g.feats + g.from[first + r] * g.depth;
    if (first + R + r < g.hits) {
      prefetch_row(g.feats + g.from[first + R + r] * g.depth,
                   g.depth * static_cast<int64_t>(sizeof(T)));
    }
  }
  // Sums of one tap start at zero and are added to the tile at the end: as fast as continuing
  // the tile's sums, and the rounding error of long channel sums stays short.
  typename S::Vector sums[R][V] = {};
  const T* panel = g.panel;
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
    T* out = g.tile + g.to[first + r] * (V * S::kLanes);
    SHIPLAP_UNROLL
    for (int v = 0; v < V; ++v) {
      S::store(out + v * S::kLanes, S::load(out + v * S::kLanes) + sums[r][v]);
    }
  }
}

template <class T, int V, int R>
void outer_sum_rows(const OuterSum<T>& o, int64_t first) {
  using S = Simd<T>;
  typename S::Vector sums[R][V] = {};
  for (int64_t h = 0; h < o.hits; ++h) {
    const T* left = o.left + o.left_row[h] * o.left_stride + first;
    const T* right = o.right + o.right_row[h] * o.right_stride;
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
    for (int v = 0; v < V; ++v) {
      S::store(out + v * S::kLanes, S::load(out + v * S::kLanes) + sums[r][v]);
    }
  }
}

// Calls body<R>(first) for groups of R <= block_rows(V) that differ by at most one row: two
// blocks of 7 and 6 keep the pipeline fuller than one of 12 and one of 1.
template <int V, template <int> class Body, class Args, int R = block_rows(V)>
void balanced_group(const Args& args, int64_t first, int64_t size) {
  if (size == R) return Body<R>::run(args, first);
  if constexpr (R > 1) balanced_group<V, Body, Args, R - 1>(args, first, size);
}

template <int V, template <int> class Body, class Args>
void balanced_groups(const Args& args, int64_t total) {
  const int64_t groups = (total + block_rows(V) - 1) / block_rows(V);
  int64_t first = 0;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t end = total * (group + 1) / groups;
    balanced_group<V, Body>(args, first, end - first);
    first = end;
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

  static void gather_gemm(const GatherGemm<T>& g) { balanced_groups<V, Gather>(g, g.hits); }
  static void outer_sum(const OuterSum<T>& o) { balanced_groups<V, Outer>(o, o.rows); }
};

template <class T>
constexpr GemmKernels<T> make_kernels() {
  GemmKernels<T> kernels{Simd<T>::kLanes, kMaxPanel, {}, {}};
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

constexpr IsaKernels kKernels{make_kernels<float>(), make_kernels<double>()};

}  // namespace
}  // namespace shiplap::sparse3d
