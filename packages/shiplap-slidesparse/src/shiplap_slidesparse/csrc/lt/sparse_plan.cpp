#include <algorithm>

#include "plan.h"

namespace shiplap::slidesparse::lt {
namespace {

constexpr uint32_t kAlignment = 16;  // bytes; pointers are held to it before each call
constexpr int kIsA = 1;

const char* name_of(Status status) {
  switch (status) {
    case 1:
      return "not initialised";
    case 2:
      return "allocation failed";
    case 3:
      return "invalid value";
    case 4:
      return "not for this architecture";
    case 6:
      return "execution failed";
    case 7:
      return "internal error";
    case 10:
      return "not supported";
    case 11:
      return "insufficient resources";
    default:
      return "error";
  }
}

// A refusal comes as "invalid value" as often as "not supported": so does a split of k that is for
// other devices. Only what tells of a broken state is more than that.
int failed(const Report& report, const char* function, Status status) {
  const bool broken = status == 1 || status == 2 || status == 6;
  return report.fail(broken ? SL_INTERNAL : SL_UNSUPPORTED, "%s: %s (status %d)", function,
                     name_of(status), status);
}

#define CUSPARSELT_TRY(function, ...)                          \
  do {                                                         \
    const Status status = api.function(__VA_ARGS__);           \
    if (status != 0) return failed(report, #function, status); \
  } while (0)

}  // namespace

int Device::open_sparse(const Cusparselt& api, const Report& report) {
  if (sparse_api != nullptr) return SL_OK;
  CUSPARSELT_TRY(cusparseLtInit, &sparse);
  sparse_api = &api;
  return SL_OK;
}

SparseMatrix::~SparseMatrix() {
  if (api_ != nullptr) api_->cusparseLtMatDescriptorDestroy(&matrix_);
}

int SparseMatrix::structured(const Device& device, const Problem& p, const Report& report) {
  const Cusparselt& api = *device.sparse_api;
  CUSPARSELT_TRY(cusparseLtStructuredDescriptorInit, &device.sparse, &matrix_, p.k, p.n, p.k,
                 kAlignment, static_cast<int>(p.in), sparse::kColumnMajor, sparse::kHalf);
  api_ = &api;
  return SL_OK;
}

int SparseMatrix::dense(const Device& device, int64_t rows, int64_t cols, int64_t type,
                        const Report& report) {
  const Cusparselt& api = *device.sparse_api;
  CUSPARSELT_TRY(cusparseLtDenseDescriptorInit, &device.sparse, &matrix_, rows, cols, rows,
                 kAlignment, static_cast<int>(type), sparse::kColumnMajor);
  api_ = &api;
  return SL_OK;
}

SparsePlan::~SparsePlan() {
  if (planned) device->sparse_api->cusparseLtMatmulPlanDestroy(&plan);
  if (selected) device->sparse_api->cusparseLtMatmulAlgSelectionDestroy(&selection);
}

int SparsePlan::make(const Device& device, const Problem& p, const Report& report,
                     std::unique_ptr<SparsePlan>* plan) {
  const auto attempt = [&](int64_t algorithm, const Report& told) {
    *plan = std::make_unique<SparsePlan>();
    (*plan)->problem = p;
    (*plan)->device = &device;
    return (*plan)->prepare(algorithm, told);
  };
  const int status = attempt(p.algorithm, report);
  if (status != SL_UNSUPPORTED || p.algorithm >= 0) return status;
  const int listed = (*plan)->algorithms;
  for (int64_t algorithm = 0; algorithm < listed; ++algorithm) {
    if (attempt(algorithm, Report(nullptr, 0)) == SL_OK) return SL_OK;
  }
  return status;
}

int SparsePlan::prepare(int64_t algorithm, const Report& report) {
  SHIPLAP_LT_TRY(describe(report));
  SHIPLAP_LT_TRY(select(algorithm, report));
  return finish(report);
}

int SparsePlan::describe(const Report& report) {
  const Cusparselt& api = *device->sparse_api;
  const Problem& p = problem;
  SHIPLAP_LT_TRY(a.structured(*device, p, report));
  SHIPLAP_LT_TRY(b.dense(*device, p.k, p.m, p.in, report));
  SHIPLAP_LT_TRY(d.dense(*device, p.n, p.m, p.out, report));
  CUSPARSELT_TRY(cusparseLtMatmulDescriptorInit, &device->sparse, &product, kTranspose,
                 kNoTranspose, a.get(), b.get(), d.get(), d.get(),
                 p.in == kInt8 ? sparse::kCompute32I : sparse::kCompute32F);
  if (p.scaling == kPerTensor)
    return report.fail(SL_UNSUPPORTED, "cuSPARSELt scales rows of the weight, or nothing");
  if (p.scaling == kPerRow) {  // the vector itself is an argument of each call
    const int yes = 1;
    CUSPARSELT_TRY(cusparseLtMatmulDescSetAttribute, &device->sparse, &product,
                   sparse::kAlphaIsVector, &yes, sizeof yes);
  }
  return SL_OK;
}

int SparsePlan::select(int64_t wanted, const Report& report) {
  const Cusparselt& api = *device->sparse_api;
  const sparse::Handle* handle = &device->sparse;
  CUSPARSELT_TRY(cusparseLtMatmulAlgSelectionInit, handle, &selection, &product, 0);
  selected = true;
  CUSPARSELT_TRY(cusparseLtMatmulAlgGetAttribute, handle, &selection, sparse::kAlgorithms,
                 &algorithms, sizeof algorithms);
  if (wanted >= algorithms) {
    return report.fail(
        SL_UNSUPPORTED, "cuSPARSELt has %d algorithms for m=%lld n=%lld k=%lld, not number %lld",
        algorithms, static_cast<long long>(problem.m), static_cast<long long>(problem.n),
        static_cast<long long>(problem.k), static_cast<long long>(wanted));
  }
  const int algorithm = static_cast<int>(wanted), split = static_cast<int>(problem.split_k);
  if (algorithm >= 0) {
    CUSPARSELT_TRY(cusparseLtMatmulAlgSetAttribute, handle, &selection, sparse::kAlgorithm,
                   &algorithm, sizeof algorithm);
  }
  if (split != 0) {
    CUSPARSELT_TRY(cusparseLtMatmulAlgSetAttribute, handle, &selection, sparse::kSplitK, &split,
                   sizeof split);
  }
  return SL_OK;
}

int SparsePlan::finish(const Report& report) {
  const Cusparselt& api = *device->sparse_api;
  const sparse::Handle* handle = &device->sparse;
  CUSPARSELT_TRY(cusparseLtMatmulPlanInit, handle, &plan, &product, &selection);
  planned = true;
  CUSPARSELT_TRY(cusparseLtMatmulGetWorkspace, handle, &plan, &workspace);
  if (workspace > problem.most_workspace()) {
    return report.fail(
        SL_UNSUPPORTED,
        "algorithm %lld with split-k %lld wants %zu bytes of workspace, more than %zu",
        static_cast<long long>(problem.algorithm), static_cast<long long>(problem.split_k),
        workspace, problem.most_workspace());
  }
  CUSPARSELT_TRY(cusparseLtSpMMACompressedSize2, handle, a.get(), &compressed, &scratch);
  return SL_OK;
}

int SparsePlan::run(const sl_context* ctx, const Operands& on) const {
  const Cusparselt& api = *device->sparse_api;
  const Report report(ctx);
  const float one = 1.0f, zero = 0.0f;
  Stream stream = ctx->stream;
  const void* alpha = problem.scaling == kPerRow ? on.scale_weight : &one;
  const std::lock_guard<std::mutex> guard(launching);
  CUSPARSELT_TRY(cusparseLtMatmul, &device->sparse, &plan, alpha, on.weight, on.x, &zero, on.out,
                 on.out, ctx->workspace, &stream, 1);
  return SL_OK;
}

int compressed_size(const Device& device, const Problem& problem, const Report& report,
                    size_t* bytes, size_t* scratch) {
  const Cusparselt& api = *device.sparse_api;
  // For 16 bits and a depth that is no multiple of 64 the two sizes differ (0.8.1): a descriptor
  // that belongs to no product has its metadata padded, and needs more.
  SparseMatrix alone;
  SHIPLAP_LT_TRY(alone.structured(device, problem, report));
  CUSPARSELT_TRY(cusparseLtSpMMACompressedSize2, &device.sparse, alone.get(), bytes, scratch);
  std::unique_ptr<SparsePlan> plan;
  SHIPLAP_LT_TRY(SparsePlan::make(device, problem, report, &plan));
  *bytes = std::max(*bytes, plan->compressed);
  *scratch = std::max(*scratch, plan->scratch);
  return SL_OK;
}

int compress(const Device& device, const Problem& problem, const void* weight, void* compressed,
             void* scratch, Stream stream, const Report& report) {
  const Cusparselt& api = *device.sparse_api;
  // With the descriptor of a product, so that products read what is written here.
  std::unique_ptr<SparsePlan> plan;
  SHIPLAP_LT_TRY(SparsePlan::make(device, problem, report, &plan));
  CUSPARSELT_TRY(cusparseLtSpMMACompress2, &device.sparse, plan->a.get(), kIsA, kTranspose, weight,
                 compressed, scratch, stream);
  return SL_OK;
}

}  // namespace shiplap::slidesparse::lt
