#include "manage.h"

#include "registry.h"

using namespace shiplap::slidesparse::lt;

namespace {

Problem read(const slidesparse_lt_problem* p) {
  return Problem{p->device, p->m, p->n, p->k, p->in, p->out, p->scaling, p->algorithm, p->split_k};
}

// Calls `use` with the plan for a problem.
template <class Use>
int with_plan(const slidesparse_lt_problem* problem, int32_t sparse, void* stream,
              const Report& report, const Use& use) {
  const DensePlan* dense_plan = nullptr;
  const SparsePlan* sparse_plan = nullptr;
  if (sparse != 0) {
    SHIPLAP_LT_TRY(registry().plan(read(problem), stream, report, &sparse_plan));
    return use(*sparse_plan);
  }
  SHIPLAP_LT_TRY(registry().plan(read(problem), stream, report, &dense_plan));
  return use(*dense_plan);
}

void put(const Version* version, int64_t* into) {
  for (int i = 0; i < 3; ++i) into[i] = version == nullptr ? -1 : version->part[i];
}

}  // namespace

int slidesparse_lt_open(const char* cublaslt, const char* cusparselt, const char* driver,
                        const int64_t oldest[3], char* error, size_t error_size) {
  const Report report(error, error_size);
  Version least;
  for (int i = 0; i < 3; ++i) least.part[i] = static_cast<int>(oldest[i]);
  return guarded(report,
                 [&] { return registry().open(cublaslt, cusparselt, driver, least, report); });
}

void slidesparse_lt_versions(int64_t versions[6]) {
  const Registry& known = registry();
  put(known.cublaslt() == nullptr ? nullptr : &known.cublaslt()->version, versions);
  put(known.cusparselt() == nullptr ? nullptr : &known.cusparselt()->version, versions + 3);
}

int slidesparse_lt_prepare(const slidesparse_lt_problem* problem, int32_t sparse, void* stream,
                           int64_t info[3], char* error, size_t error_size) {
  const Report report(error, error_size);
  return guarded(report, [&]() -> int {
    return with_plan(problem, sparse, stream, report, [&](const auto& plan) -> int {
      info[0] = static_cast<int64_t>(plan.workspace);
      info[1] = static_cast<int64_t>(plan.compressed);
      info[2] = plan.algorithms;
      return SL_OK;
    });
  });
}

int slidesparse_lt_compressed_size(const slidesparse_lt_problem* problem, int64_t sizes[2],
                                   char* error, size_t error_size) {
  const Report report(error, error_size);
  return guarded(report, [&]() -> int {
    const Device* device = nullptr;
    size_t bytes = 0, scratch = 0;
    SHIPLAP_LT_TRY(registry().device(problem->device, report, &device));
    SHIPLAP_LT_TRY(compressed_size(*device, read(problem), report, &bytes, &scratch));
    sizes[0] = static_cast<int64_t>(bytes);
    sizes[1] = static_cast<int64_t>(scratch);
    return SL_OK;
  });
}

int slidesparse_lt_compress(const slidesparse_lt_problem* problem, const void* weight,
                            void* compressed, void* scratch, void* stream, char* error,
                            size_t error_size) {
  const Report report(error, error_size);
  return guarded(report, [&]() -> int {
    const Device* device = nullptr;
    SHIPLAP_LT_TRY(registry().device(problem->device, report, &device));
    return compress(*device, read(problem), weight, compressed, scratch, stream, report);
  });
}

int slidesparse_lt_multiply(const slidesparse_lt_problem* problem, int32_t sparse, const void* x,
                            const void* weight, const void* scale_x, const void* scale_weight,
                            void* out, void* workspace, size_t workspace_size, void* stream,
                            char* error, size_t error_size) {
  const sl_context ctx{SL_ABI_VERSION, 1,          stream,  workspace, workspace_size,
                       error,          error_size, nullptr, 0};
  const Report report(error, error_size);
  return guarded(report, [&]() -> int {
    return with_plan(problem, sparse, stream, report, [&](const auto& plan) -> int {
      if (plan.workspace > workspace_size)
        return report.fail(SL_INTERNAL, "workspace of %zu bytes", workspace_size);
      return plan.run(&ctx, Operands{x, weight, scale_x, scale_weight, out});
    });
  });
}

int64_t slidesparse_lt_plans(void) { return static_cast<int64_t>(registry().plans()); }

void slidesparse_lt_forget(void) { forget(); }
