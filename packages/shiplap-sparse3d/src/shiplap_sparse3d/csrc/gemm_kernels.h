// The inner loops of a sparse convolution, one build per instruction set.
//
// gemm_kernels_impl.h is compiled once per instruction set (gemm_kernels_<isa>.cpp, flags in
// CMakeLists.txt) and everything in it has internal linkage: a template that the linker could
// merge across these files would carry AVX-512 code into the baseline path.
#ifndef SHIPLAP_SPARSE3D_GEMM_KERNELS_H_
#define SHIPLAP_SPARSE3D_GEMM_KERNELS_H_

#include <cstdint>

#include "number.h"
#include "row_kernels.h"

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
  Hit* lists;            // list of tap v starts at lists + v * list_stride, with room for `rows`,
                         // rounded up to a multiple of 16
  int64_t list_stride;
  int32_t* counts;       // hits per tap, starts at zero
};

// For each hit: tile[to] += feats[from] @ panels, where `panels` lie behind each other, each
// [depth, its columns].
template <class T>
struct GatherGemm {
  const T* feats;  // [*, feats_stride], of which the first `depth` channels are read
  int64_t feats_stride;
  int64_t depth;
  const T* panel;
  int64_t panels;
  T* tile;         // [*, tile_stride]
  int64_t tile_stride;
  const Hit* hits;
  int64_t count;
};

// The same of bfloat16 with an even depth. Panels are [depth / 2, columns, 2]: two channels of a
// column lie side by side, as products of pairs read them.
struct GatherPairs {
  const Bfloat16* feats;
  int64_t feats_stride;
  int64_t depth;
  const Bfloat16* panel;
  int64_t panels;
  float* tile;
  int64_t tile_stride;
  const Hit* hits;
  int64_t count;
};

// Widens rows[index[0]], rows[index[2]], ... to consecutive rows of `out`, padded with zeros.
template <class S>
struct GatherRows {
  const S* rows;         // [*, columns]
  int64_t columns;
  const int32_t* index;  // every second value is used: one side of a list of hits
  int64_t count;
  Sum<S>* out;           // [count, out_stride]
  int64_t out_stride;    // columns, rounded up to whole vectors
};

// Rounds rows of sums to the element type.
template <class S>
struct StoreRows {
  const Sum<S>* rows;
  int64_t stride;
  int64_t columns;
  int64_t count;
  S* out;
  int64_t out_stride;
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

// The same of rows where they lie: row i of `left` is the one that left_index[2 * i] names, and so for `right`, each one
// side of a list of hits. The panel is whole vectors of a row.
template <class T>
struct GatherOuter {
  const T* left;
  int64_t left_stride;
  const int32_t* left_index;
  int64_t rows;
  const T* right;
  int64_t right_stride;
  const int32_t* right_index;
  T* sums;
  int64_t sums_stride;
  int64_t count;
};

template <class T>
struct GemmKernels {
  int64_t lanes;    // elements per vector
  int max_vectors;  // widest panel this instruction set has registers for
  // Indexed by vectors per panel - 1.
  void (*gather_gemm[kMaxVectors])(const GatherGemm<T>&);
  void (*outer_sum[kMaxVectors])(const OuterSum<T>&);
  void (*gather_outer[kMaxVectors])(const GatherOuter<T>&);
};

// Between elements as they are stored and rows of sums.
template <class S>
struct StorageKernels {
  void (*gather_rows)(const GatherRows<S>&);
  void (*store_rows)(const StoreRows<S>&);
  RowKernels<S> rows;
};

enum Isa : int32_t { kBaseline = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3, kIsaCount = 4 };

struct IsaKernels {
  bool (*collect_hits)(const CollectHits&);  // false when an entry is out of range
  GemmKernels<float> f32_gemm;
  GemmKernels<double> f64_gemm;
  StorageKernels<float> f32;
  StorageKernels<double> f64;
  StorageKernels<Half> f16;
  StorageKernels<Bfloat16> bf16;
  // As GemmKernels<float>::gather_gemm; null where the instruction set has no products of pairs.
  void (*gather_pairs[kMaxVectors])(const GatherPairs&);

  const GemmKernels<float>& gemm(float) const { return f32_gemm; }
  const GemmKernels<double>& gemm(double) const { return f64_gemm; }
  const StorageKernels<float>& of(float) const { return f32; }
  const StorageKernels<double>& of(double) const { return f64; }
  const StorageKernels<Half>& of(Half) const { return f16; }
  const StorageKernels<Bfloat16>& of(Bfloat16) const { return bf16; }
};

const IsaKernels& baseline_kernels();
const IsaKernels& avx2_kernels();  // x86-64 only, like the next
const IsaKernels& avx512_kernels();
const IsaKernels& avx512bf16_kernels();

// Kernels of one instruction set, or nullptr when this machine cannot run it.
const IsaKernels* isa_kernels(int32_t isa);
// Kernels of the best instruction set of this machine.
const IsaKernels& best_kernels();

}  // namespace shiplap::sparse3d

#endif  // SHIPLAP_SPARSE3D_GEMM_KERNELS_H_
