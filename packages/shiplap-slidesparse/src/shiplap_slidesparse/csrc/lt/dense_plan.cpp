#include <initializer_list>

#include "plan.h"

namespace shiplap::slidesparse::lt {
namespace {

constexpr int kRanked = 16;  // algorithms that the library is asked for

const char* name_of(Status status) {
  switch (status) {
    case 1:
      return "not initialised";
    case 3:
      return "allocation failed";
    case 7:
      return "invalid value";
    case 8:
      return "not for this architecture";
    case 13:
      return "execution failed";
    case 14:
      return "internal error";
    case 15:
      return "not supported";
    default:
      return "error";
  }
}

int failed(const Report& report, const char* function, Status status) {
  const bool broken = status == 1 || status == 3 || status == 13;  // else this product is refused
  return report.fail(broken ? SL_INTERNAL : SL_UNSUPPORTED, "%s: %s (status %d)", function,
                     name_of(status), status);
}

#define CUBLASLT_TRY(function, ...)                            \
  do {                                                         \
    const Status status = api.function(__VA_ARGS__);           \
    if (status != 0) return failed(report, #function, status); \
  } while (0)

bool integral(const Problem& problem) { return problem.in == kInt8; }

int describe(const Cublaslt& api, DensePlan* plan, const Report& report) {
  const Problem& p = plan->problem;
  const int transposed = kTranspose;
  CUBLASLT_TRY(cublasLtMatmulDescInit_internal, &plan->description, sizeof plan->description,
               integral(p) ? dense::kCompute32I : dense::kCompute32F,
               integral(p) ? kInt32 : kFloat32);
  const auto set = [&](int field, const void* value, size_t size) {
    return api.cublasLtMatmulDescSetAttribute(&plan->description, field, value, size);
  };
  if (set(dense::kTransposeA, &transposed, sizeof transposed) != 0) {
    return report.fail(SL_INTERNAL, "cuBLASLt takes no transposed weight");
  }
  if (p.in == kFloat8E4M3) {
    const int8_t fast = 1;  // sums in the tensor core, as the sparse kernels have them
    if (set(dense::kFastAccumulation, &fast, sizeof fast) != 0) {
      return report.fail(SL_UNSUPPORTED, "cuBLASLt has no fast accumulation");
    }
  }
  if (p.scaling != kUnscaled) {
    const int mode = p.scaling == kPerRow ? dense::kScalePerRow : dense::kOneScale;
    // The heuristic reads the alignment of a pointer and not what it points to; `run` puts in the
    // real one.
    const void* somewhere = reinterpret_cast<const void*>(uintptr_t{16});
    for (int field : {dense::kScaleModeOfA, dense::kScaleModeOfB}) {
      if (set(field, &mode, sizeof mode) != 0)
        return report.fail(SL_UNSUPPORTED, "cuBLASLt has no such scales");
    }
    for (int field : {dense::kScaleOfA, dense::kScaleOfB}) {
      if (set(field, &somewhere, sizeof somewhere) != 0)
        return report.fail(SL_INTERNAL, "cuBLASLt takes no scales");
    }
  }
  CUBLASLT_TRY(cublasLtMatrixLayoutInit_internal, &plan->a, sizeof plan->a, static_cast<int>(p.in),
               p.k, p.n, p.k);
  CUBLASLT_TRY(cublasLtMatrixLayoutInit_internal, &plan->b, sizeof plan->b, static_cast<int>(p.in),
               p.k, p.m, p.k);
  CUBLASLT_TRY(cublasLtMatrixLayoutInit_internal, &plan->d, sizeof plan->d, static_cast<int>(p.out),
               p.n, p.m, p.n);
  return SL_OK;
}

int choose(const Cublaslt& api, DensePlan* plan, const Report& report) {
  dense::Preference preference;
  const size_t most = kWorkspace;
  CUBLASLT_TRY(cublasLtMatmulPreferenceInit_internal, &preference, sizeof preference);
  CUBLASLT_TRY(cublasLtMatmulPreferenceSetAttribute, &preference, dense::kMostWorkspace, &most,
               sizeof most);
  dense::Heuristic ranked[kRanked] = {};
  int found = 0;
  CUBLASLT_TRY(cublasLtMatmulAlgoGetHeuristic, plan->device->dense, &plan->description, &plan->a,
               &plan->b, &plan->d, &plan->d, &preference, kRanked, ranked, &found);
  const int64_t rank = plan->problem.algorithm < 0 ? 0 : plan->problem.algorithm;
  if (rank >= found || ranked[rank].state != 0) {
    return report.fail(
        SL_UNSUPPORTED, "cuBLASLt lists %d algorithms for m=%lld n=%lld k=%lld, not number %lld",
        found, static_cast<long long>(plan->problem.m), static_cast<long long>(plan->problem.n),
        static_cast<long long>(plan->problem.k), static_cast<long long>(rank));
  }
  plan->algorithm = ranked[rank].algorithm;
  plan->algorithms = found;
  plan->workspace = ranked[rank].workspace;
  return SL_OK;
}

}  // namespace

Device::~Device() {
  if (dense != nullptr) dense_api->cublasLtDestroy(dense);
  if (sparse_api != nullptr) sparse_api->cusparseLtDestroy(&sparse);
}

int Device::open_dense(const Cublaslt& api, const Report& report) {
  if (dense != nullptr) return SL_OK;
  CUBLASLT_TRY(cublasLtCreate, &dense);
  dense_api = &api;
  return SL_OK;
}

int DensePlan::make(const Device& device, const Problem& problem, const Report& report,
                    std::unique_ptr<DensePlan>* plan) {
  auto made = std::make_unique<DensePlan>();
  made->problem = problem;
  made->device = &device;
  SHIPLAP_LT_TRY(describe(*device.dense_api, made.get(), report));
  SHIPLAP_LT_TRY(choose(*device.dense_api, made.get(), report));
  *plan = std::move(made);
  return SL_OK;
}

int DensePlan::run(const sl_context* ctx, const Operands& on) const {
  const Cublaslt& api = *device->dense_api;
  const Report report(ctx);
  // A copy of the call's own: scales move from call to call, and calls of several threads meet
  // here.
  dense::Description own = description;
  if (problem.scaling != kUnscaled) {
    CUBLASLT_TRY(cublasLtMatmulDescSetAttribute, &own, dense::kScaleOfA, &on.scale_weight,
                 sizeof on.scale_weight);
    CUBLASLT_TRY(cublasLtMatmulDescSetAttribute, &own, dense::kScaleOfB, &on.scale_x,
                 sizeof on.scale_x);
  }
  const float ones = 1.0f, zeros = 0.0f;
  const int32_t one = 1, zero = 0;
  const bool whole = integral(problem);
  const void *alpha = whole ? static_cast<const void*>(&one) : &ones,
             *beta = whole ? static_cast<const void*>(&zero) : &zeros;
  // The layouts are not written: their functions take pointers to mutable memory all the same.
  auto* layout_a = const_cast<dense::Layout*>(&a);
  auto* layout_b = const_cast<dense::Layout*>(&b);
  auto* layout_d = const_cast<dense::Layout*>(&d);
  CUBLASLT_TRY(cublasLtMatmul, device->dense, &own, alpha, on.weight, layout_a, on.x, layout_b,
               beta, on.out, layout_d, on.out, layout_d, &algorithm, ctx->workspace,
               ctx->workspace_size, ctx->stream);
  return SL_OK;
}

}  // namespace shiplap::slidesparse::lt
