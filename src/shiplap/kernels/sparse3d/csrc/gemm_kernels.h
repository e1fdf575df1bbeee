// The two inner loops of a sparse convolution, one build per instruction set.
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
constexpr int kMaxVectors = 4;         // widest panel, in vectors
constexpr int64_t kMaxPanelBytes = 256;  // the same in bytes: 4 vectors of 64

// For each hit h: tile[to[h]] += feats[from[h]] @ panel.
template <class T>
struct GatherGemm {
  const T* feats;        // [*, depth]
  int64_t depth;         // input channels
  const T* panel;        // [depth, columns], columns = the panel's vectors * lanes
  T* tile;               // [*, columns]
  const int32_t* from;   // row of feats of each hit
  const int32_t* to;     // row of tile of each hit; ascending
  int64_t hits;
};

// For each row r of `rows` and hit h: sums[r] += left[left_row[h], r] * right[right_row[h]].
template <class T>
struct OuterSum {
  const T* left;              // [*, left_stride]; `rows` consecutive columns of it are used
  int64_t left_stride;
  int64_t rows;
  const T* right;             // [*, right_stride]; a panel of columns of it is used
  int64_t right_stride;
  T* sums;                    // [rows, sums_stride]
  int64_t sums_stride;
  const int32_t* left_row;
  const int32_t* right_row;
  int64_t hits;
};

template <class T>
struct GemmKernels {
  int64_t lanes;        // elements per vector
  int max_vectors;      // widest panel this instruction set has registers for
  // Indexed by vectors per panel - 1.
  void (*gather_gemm[kMaxVectors])(const GatherGemm<T>&);
  void (*outer_sum[kMaxVectors])(const OuterSum<T>&);
};

enum Isa : int32_t { kBaseline = 0, kAvx2 = 1, kAvx512 = 2, kIsaCount = 3 };

struct IsaKernels {
  GemmKernels<float> f32;
  GemmKernels<double> f64;

  const GemmKernels<float>& of(float) const { return f32; }
  const GemmKernels<double>& of(double) const { return f64; }
};

const IsaKernels& baseline_kernels();
const IsaKernels& avx2_kernels();    // x86-64 only, like the next
const IsaKernels& avx512_kernels();

// Kernels of one instruction set, or nullptr when this machine cannot run it.
const IsaKernels* isa_kernels(int32_t isa);
// Kernels of the best instruction set of this machine.
const IsaKernels& best_kernels();

}  // namespace shiplap::sparse3d

#endif  // SHIPLAP_SPARSE3D_GEMM_KERNELS_H_
