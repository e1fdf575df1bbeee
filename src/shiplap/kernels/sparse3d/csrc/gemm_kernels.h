// The inner loops of a sparse convolution, one build per instruction set.
//
// gemm_kernels_impl.h is compiled once per instruction set (gemm_kernels_<isa>.cpp, flags in
// CMakeLists.txt) and everything in it has internal linkage: a template that the linker could
// merge across these files would carry AVX-512 code into the baseline path.
#ifndef SHIPLAP_SPARSE3D_GEMM_KERNELS_H_
#define SHIPLAP_SPARSE3D_GEMM_KERNELS_H_

#include <cstdint>

namespace shiplap::sparse3d {

// Columns of every packed matrix are padded to this many elements, a whole number of vectors for
// every instruction set and dtype, so workspace sizes do not depend on the machine.
constexpr int64_t kColumnPad = 16;
constexpr int kMaxVectors = 4;  // widest panel of any instruction set

// An entry of a table that is not -1.
struct Hit {
  int32_t from;  // the entry: a row of feats
  int32_t to;    // the table row that has it, counted from the start of its block
};

// Sorts the hits of `rows` table rows into one list per tap, in row order.
struct CollectHits {
  const int32_t* table;  // first entry of the first row
  int64_t table_stride;  // entries from a row to the next
  int64_t rows;
  int64_t taps;
  int64_t limit;         // entries must lie in [-1, limit)
  Hit* lists;            // list of tap v starts at lists + v * list_stride, with room for `rows`
  int64_t list_stride;
  int32_t* counts;       // hits per tap, starts at zero
};

// For each hit: tile[to] += feats[from] @ panels, where `panels` lie behind each other, each
// [depth, its columns].
template <class T>
struct GatherGemm {
  const T* feats;  // [*, depth]
  int64_t depth;   // input channels
  const T* panel;
  int64_t panels;
  T* tile;         // [*, tile_stride]
  int64_t tile_stride;
  const Hit* hits;
  int64_t count;
};

// Copies rows[index[0]], rows[index[2]], ... to consecutive rows of `out`, padded with zeros.
template <class T>
struct GatherRows {
  const T* rows;         // [*, columns]
  int64_t columns;
  const int32_t* index;  // every second value is used: one side of a list of hits
  int64_t count;
  T* out;                // [count, out_stride]
  int64_t out_stride;    // columns, rounded up to whole vectors
};

// sums[r, :] += sum over i of left[i, r] * right[i, :] for r in [0, rows), one panel of columns.
template <class T>
struct OuterSum {
  const T* left;
  int64_t left_stride;
  int64_t rows;
  const T* right;
  int64_t right_stride;
  T* sums;
  int64_t sums_stride;
  int64_t count;
};

template <class T>
struct GemmKernels {
  int64_t lanes;    // elements per vector
  int max_vectors;  // widest panel this instruction set has registers for
  void (*gather_rows)(const GatherRows<T>&);
  // Indexed by vectors per panel - 1.
  void (*gather_gemm[kMaxVectors])(const GatherGemm<T>&);
  void (*outer_sum[kMaxVectors])(const OuterSum<T>&);
};

enum Isa : int32_t { kBaseline = 0, kAvx2 = 1, kAvx512 = 2, kIsaCount = 3 };

struct IsaKernels {
  bool (*collect_hits)(const CollectHits&);  // false when an entry is out of range
  GemmKernels<float> f32;
  GemmKernels<double> f64;

  const GemmKernels<float>& of(float) const { return f32; }
  const GemmKernels<double>& of(double) const { return f64; }
};

const IsaKernels& baseline_kernels();
const IsaKernels& avx2_kernels();  // x86-64 only, like the next
const IsaKernels& avx512_kernels();

// Kernels of one instruction set, or nullptr when this machine cannot run it.
const IsaKernels* isa_kernels(int32_t isa);
// Kernels of the best instruction set of this machine.
const IsaKernels& best_kernels();

}  // namespace shiplap::sparse3d

#endif  // SHIPLAP_SPARSE3D_GEMM_KERNELS_H_
