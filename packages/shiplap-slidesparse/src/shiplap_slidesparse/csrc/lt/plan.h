// What a product is, and plans for it: all that does not depend on where the matrices lie, worked
// out once.
//
// Roles: x row-major [m, k], weight row-major [n, k], out = x @ weight.T row-major [m, n]. Both
// libraries think in column-major matrices: weight is A [k, n] transposed, x is B [k, m], out is D
// [n, m]. That is the layout which tensor cores take for 8-bit operands.
#ifndef SHIPLAP_SLIDESPARSE_LT_PLAN_H_
#define SHIPLAP_SLIDESPARSE_LT_PLAN_H_

#include <memory>
#include <mutex>

#include "library.h"

namespace shiplap::slidesparse::lt {

// What cuBLASLt takes by default on Hopper. Every plan keeps within its bound, so that an op can
// declare its workspace without knowing the plan.
constexpr size_t kWorkspace = size_t{32} << 20;

// Of x and weight both; a sparse product takes the scales of its weight only, per row, and that of
// integers only (cuSPARSELt 0.8.1: "INT8 input, INT32 compute kernels").
enum Scaling : int64_t { kUnscaled = 0, kPerTensor = 1, kPerRow = 2 };

// Integers only, without padding: compared and hashed as they are.
struct Problem {
  int64_t device, m, n, k;
  int64_t in, out;    // CudaType
  int64_t scaling;    // Scaling
  int64_t algorithm;  // dense: rank in the library's list; sparse: its algorithm id; -1: the
                      // library's choice
  int64_t split_k;    // sparse only; 0: the library's choice
  // Of a sparse plan. cuSPARSELt 0.8.1 wants an eighth of a byte for each element of the weight,
  // and up to 13 MB for the rows (H200, 2026-11).
  size_t most_workspace() const { return kWorkspace + static_cast<size_t>(n) * k / 4; }
  bool operator==(const Problem& other) const;
  size_t hash() const;
};

// One product's operands.
struct Operands {
  const void *x, *weight, *scale_x, *scale_weight;  // a sparse product's weight is compressed
  void* out;
};

// Handles of one device. Created with that device current, as both libraries want it.
struct Device {
  const Cublaslt* dense_api = nullptr;
  dense::Handle dense = nullptr;
  const Cusparselt* sparse_api = nullptr;
  sparse::Handle sparse;
  Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  ~Device();
  int open_dense(const Cublaslt& api, const Report& report);
  int open_sparse(const Cusparselt& api, const Report& report);
};

struct DensePlan {
  Problem problem;
  const Device* device;
  dense::Description description;
  dense::Layout a, b, d;
  dense::Algorithm algorithm;
  size_t workspace;
  int algorithms;         // that the library has listed
  size_t compressed = 0;  // it is not

  static int make(const Device& device, const Problem& problem, const Report& report,
                  std::unique_ptr<DensePlan>* plan);
  int run(const sl_context* ctx, const Operands& on) const;
};

// The weight's side of a sparse product, which is all that compression needs.
class SparseMatrix {
 public:
  SparseMatrix() = default;
  SparseMatrix(const SparseMatrix&) = delete;
  SparseMatrix& operator=(const SparseMatrix&) = delete;
  ~SparseMatrix();
  int structured(const Device& device, const Problem& problem, const Report& report);
  int dense(const Device& device, int64_t rows, int64_t cols, int64_t type, const Report& report);
  const sparse::Matrix* get() const { return &matrix_; }

 private:
  const Cusparselt* api_ = nullptr;  // set once there is something to destroy
  sparse::Matrix matrix_;
};

struct SparsePlan {
  Problem problem;
  const Device* device = nullptr;
  SparseMatrix a, b, d;
  sparse::Product product;
  sparse::Selection selection;
  sparse::Plan plan;
  size_t workspace = 0;
  size_t compressed = 0, scratch = 0;  // bytes of the compressed weight, and for making it
  int algorithms = 0;
  bool selected = false, planned = false;  // what has to be destroyed
  // cuSPARSELt writes a call's operands into the plan: of two calls at once, both launched with the
  // same ones (0.8.1, H200, 2026-11).
  mutable std::mutex launching;

  ~SparsePlan();
  // With no algorithm asked for, the library's own choice, or the first that can be had.
  static int make(const Device& device, const Problem& problem, const Report& report,
                  std::unique_ptr<SparsePlan>* plan);
  int run(const sl_context* ctx, const Operands& on) const;

 private:
  int prepare(int64_t algorithm, const Report& report);
  int describe(const Report& report);
  int select(int64_t algorithm, const Report& report);
  int finish(const Report& report);
};

// Bytes of the compressed weight and of the scratch for making it: at least those that any plan for
// the weight asks for.
int compressed_size(const Device& device, const Problem& problem, const Report& report,
                    size_t* bytes, size_t* scratch);
// Compresses a row-major weight [n, k] that is 2:4 along k.
int compress(const Device& device, const Problem& problem, const void* weight, void* compressed,
             void* scratch, Stream stream, const Report& report);

}  // namespace shiplap::slidesparse::lt

#endif  // SHIPLAP_SLIDESPARSE_LT_PLAN_H_
