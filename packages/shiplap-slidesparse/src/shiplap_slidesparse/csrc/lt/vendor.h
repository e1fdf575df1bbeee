// The functions of cuBLASLt, cuSPARSELt and the CUDA driver that we call, as NVIDIA documents them
// (2026-11: cuBLASLt 12.9 and 13.x, cuSPARSELt 0.8.1 to 0.10.0). No header of theirs is needed to
// build, and no library to load: see library.h.
#ifndef SHIPLAP_SLIDESPARSE_LT_VENDOR_H_
#define SHIPLAP_SLIDESPARSE_LT_VENDOR_H_

#include <cstddef>
#include <cstdint>

namespace shiplap::slidesparse::lt {

using Status = int;  // 0 is success everywhere
using Stream = void*;

enum CudaType : int {
  kFloat32 = 0,
  kFloat16 = 2,
  kInt8 = 3,
  kInt32 = 10,
  kBFloat16 = 14,
  kFloat8E4M3 = 28
};
enum Operation : int { kNoTranspose = 0, kTranspose = 1 };  // the same numbers in both libraries

// ---------------------------------------------------------------------------------------- cuBLASLt

namespace dense {

using Handle = void*;
// "Semi-opaque" in NVIDIA's words: fixed sizes, memory of the caller.
struct Layout {
  uint64_t data[8];
};
struct Description {
  uint64_t data[32];
};
struct Preference {
  uint64_t data[8];
};
struct Algorithm {
  uint64_t data[8];
};
struct Heuristic {
  Algorithm algorithm;
  size_t workspace;
  Status state;
  float waves;
  int reserved[4];
};

enum Compute : int { kCompute32F = 68, kCompute32I = 72 };
enum DescriptionField : int {
  kTransposeA = 3,
  kTransposeB = 4,
  kScaleOfA = 17,
  kScaleOfB = 18,
  kFastAccumulation = 25,
  kScaleModeOfA = 31,
  kScaleModeOfB = 32
};
enum ScaleMode : int { kOneScale = 0, kScalePerRow = 3 };
enum PreferenceField : int { kMostWorkspace = 1 };

}  // namespace dense

#define SHIPLAP_CUBLASLT(X)                                                                       \
  X(cublasLtCreate, (dense::Handle*))                                                             \
  X(cublasLtDestroy, (dense::Handle))                                                             \
  X(cublasLtGetProperty, (int field, int* value))                                                 \
  X(cublasLtMatrixLayoutInit_internal,                                                            \
    (dense::Layout*, size_t, int type, uint64_t rows, uint64_t cols, int64_t ld))                 \
  X(cublasLtMatmulDescInit_internal, (dense::Description*, size_t, int compute, int scale_type))  \
  X(cublasLtMatmulDescSetAttribute, (dense::Description*, int field, const void* value, size_t))  \
  X(cublasLtMatmulPreferenceInit_internal, (dense::Preference*, size_t))                          \
  X(cublasLtMatmulPreferenceSetAttribute,                                                         \
    (dense::Preference*, int field, const void* value, size_t))                                   \
  X(cublasLtMatmulAlgoGetHeuristic,                                                               \
    (dense::Handle, dense::Description*, dense::Layout * a, dense::Layout * b, dense::Layout * c, \
     dense::Layout * d, dense::Preference*, int asked, dense::Heuristic*, int* found))            \
  X(cublasLtMatmul,                                                                               \
    (dense::Handle, dense::Description*, const void* alpha, const void* a, dense::Layout*,        \
     const void* b, dense::Layout*, const void* beta, const void* c, dense::Layout*, void* d,     \
     dense::Layout*, const dense::Algorithm*, void* workspace, size_t, Stream))

// -------------------------------------------------------------------------------------- cuSPARSELt

namespace sparse {

template <int>
struct alignas(16) Opaque {
  uint8_t data[512];
};
using Handle = Opaque<0>;
using Matrix = Opaque<1>;
using Product = Opaque<2>;
using Selection = Opaque<3>;
using Plan = Opaque<4>;

enum Order : int { kColumnMajor = 1 };
enum Sparsity : int { kHalf = 0 };
enum Compute : int { kCompute32I = 0, kCompute32F = 2 };
enum ProductField : int { kAlphaIsVector = 5 };
enum SelectionField : int { kAlgorithm = 0, kAlgorithms = 1, kSplitK = 3 };

}  // namespace sparse

#define SHIPLAP_CUSPARSELT(X)                                                                     \
  X(cusparseLtInit, (sparse::Handle*))                                                            \
  X(cusparseLtDestroy, (const sparse::Handle*))                                                   \
  X(cusparseLtGetProperty, (int field, int* value))                                               \
  X(cusparseLtDenseDescriptorInit,                                                                \
    (const sparse::Handle*, sparse::Matrix*, int64_t rows, int64_t cols, int64_t ld,              \
     uint32_t alignment, int type, int order))                                                    \
  X(cusparseLtStructuredDescriptorInit,                                                           \
    (const sparse::Handle*, sparse::Matrix*, int64_t rows, int64_t cols, int64_t ld,              \
     uint32_t alignment, int type, int order, int sparsity))                                      \
  X(cusparseLtMatDescriptorDestroy, (const sparse::Matrix*))                                      \
  X(cusparseLtMatmulDescriptorInit,                                                               \
    (const sparse::Handle*, sparse::Product*, int op_a, int op_b, const sparse::Matrix* a,        \
     const sparse::Matrix* b, const sparse::Matrix* c, const sparse::Matrix* d, int compute))     \
  X(cusparseLtMatmulDescSetAttribute,                                                             \
    (const sparse::Handle*, sparse::Product*, int field, const void* value, size_t))              \
  X(cusparseLtMatmulAlgSelectionInit,                                                             \
    (const sparse::Handle*, sparse::Selection*, const sparse::Product*, int algorithm))           \
  X(cusparseLtMatmulAlgSelectionDestroy, (const sparse::Selection*))                              \
  X(cusparseLtMatmulAlgSetAttribute,                                                              \
    (const sparse::Handle*, sparse::Selection*, int field, const void* value, size_t))            \
  X(cusparseLtMatmulAlgGetAttribute,                                                              \
    (const sparse::Handle*, const sparse::Selection*, int field, void* value, size_t))            \
  X(cusparseLtMatmulPlanInit,                                                                     \
    (const sparse::Handle*, sparse::Plan*, const sparse::Product*, const sparse::Selection*))     \
  X(cusparseLtMatmulPlanDestroy, (const sparse::Plan*))                                           \
  X(cusparseLtMatmulGetWorkspace, (const sparse::Handle*, const sparse::Plan*, size_t*))          \
  X(cusparseLtMatmul,                                                                             \
    (const sparse::Handle*, const sparse::Plan*, const void* alpha, const void* a, const void* b, \
     const void* beta, const void* c, void* d, void* workspace, Stream*, int32_t streams))        \
  X(cusparseLtSpMMACompressedSize2,                                                               \
    (const sparse::Handle*, const sparse::Matrix*, size_t* bytes, size_t* scratch))               \
  X(cusparseLtSpMMACompress2, (const sparse::Handle*, const sparse::Matrix*, int is_a, int op,    \
                               const void* dense, void* compressed, void* scratch, Stream))

// ------------------------------------------------------------------------------------------ driver

#define SHIPLAP_DRIVER(X)                               \
  X(cuStreamIsCapturing, (Stream, int* capturing))      \
  X(cuThreadExchangeStreamCaptureMode, (int* mode))     \
  X(cuMemsetD8Async, (uint64_t where, unsigned char value, size_t bytes, Stream))

}  // namespace shiplap::slidesparse::lt

#endif  // SHIPLAP_SLIDESPARSE_LT_VENDOR_H_
