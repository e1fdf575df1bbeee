// The kernels: arguments held to what the libraries promise themselves of them, the plan looked up,
// one call.
#include "../slidesparse.h"
#include "registry.h"

using namespace shiplap::slidesparse::lt;

namespace {

constexpr int kCuda = 2, kVendorLayout = 1;
constexpr int64_t kAlignment = 16;  // bytes: what descriptors promise of pointers

char* address(const DLTensor* tensor) {
  return static_cast<char*>(tensor->data) + tensor->byte_offset;
}

int on_gpu(const Report& report, const char* name, const DLTensor* tensor) {
  if (tensor == nullptr) return report.fail(SL_INVALID_ARGUMENT, "%s is missing", name);
  if (tensor->device.device_type != kCuda)
    return report.fail(SL_UNSUPPORTED, "%s is not on a GPU", name);
  if (reinterpret_cast<uintptr_t>(address(tensor)) % kAlignment == 0) return SL_OK;
  return report.fail(SL_INVALID_ARGUMENT,
                     "%s starts at an address that is no multiple of %d: pass .clone()", name,
                     static_cast<int>(kAlignment));
}

int64_t config(const sl_context* ctx, size_t index, int64_t otherwise) {
  return index < ctx->config_size ? ctx->config[index] : otherwise;
}

// A product over no depth, or of nothing.
bool trivial(const Problem& p) { return p.m == 0 || p.n == 0 || p.k == 0; }

int clear(const sl_context* ctx, const Problem& p, const DLTensor* out) {
  const Report report(ctx);
  const size_t bytes = static_cast<size_t>(p.m) * p.n * (out->dtype.bits / 8);
  if (bytes == 0) return SL_OK;
  const Driver* driver = nullptr;
  SHIPLAP_LT_TRY(registry().driver(report, &driver));
  const Status status =
      driver->cuMemsetD8Async(reinterpret_cast<uint64_t>(address(out)), 0, bytes, ctx->stream);
  return status == 0 ? static_cast<int>(SL_OK)
                     : report.fail(SL_INTERNAL, "cuMemsetD8Async: status %d", status);
}

int check_workspace(const sl_context* ctx, size_t needed) {
  if (needed <= ctx->workspace_size) return SL_OK;
  return Report(ctx).fail(SL_INTERNAL, "workspace of %zu bytes, needs %zu", ctx->workspace_size,
                          needed);
}

int dense_product(const sl_context* ctx, const DLTensor* q, const DLTensor* weight,
                  const DLTensor* scale_q, const DLTensor* scale_weight, DLTensor* out, CudaType in,
                  CudaType result) {
  const Report report(ctx);
  return guarded(report, [&]() -> int {
    SHIPLAP_LT_TRY(on_gpu(report, "q", q));
    SHIPLAP_LT_TRY(on_gpu(report, "weight", weight));
    const bool scaled = scale_q != nullptr;
    if (scaled) {
      SHIPLAP_LT_TRY(on_gpu(report, "scale_q", scale_q));
      SHIPLAP_LT_TRY(on_gpu(report, "scale_weight", scale_weight));
    }
    const Problem problem{q->device.device_id,
                          q->shape[0],
                          weight->shape[0],
                          q->shape[1],
                          in,
                          result,
                          scaled ? kPerRow : kUnscaled,
                          config(ctx, 0, -1),
                          0};
    if (trivial(problem)) return clear(ctx, problem, out);
    const DensePlan* plan = nullptr;
    SHIPLAP_LT_TRY(registry().plan(problem, ctx->stream, report, &plan));
    SHIPLAP_LT_TRY(check_workspace(ctx, plan->workspace));
    return plan->run(ctx, Operands{address(q), address(weight), scaled ? address(scale_q) : nullptr,
                                   scaled ? address(scale_weight) : nullptr, address(out)});
  });
}

// Numbers of algorithms mean nothing in another version than the one they were measured with: then
// the library chooses.
Problem served(const sl_context* ctx, Problem problem) {
  const int64_t measured_with = config(ctx, 2, 0);
  const Cusparselt* library = registry().cusparselt();
  if (measured_with != 0 && library != nullptr && measured_with != library->version.number()) {
    problem.algorithm = -1;
    problem.split_k = 0;
  }
  return problem;
}

int sparse_product(const sl_context* ctx, const DLTensor* x, const DLTensor* packed, DLTensor* out,
                   int64_t layout, CudaType in, CudaType result) {
  const Report report(ctx);
  return guarded(report, [&]() -> int {
    if (layout != kVendorLayout) {
      return report.fail(SL_UNSUPPORTED,
                         "the weight is in the portable layout: pack it on the GPU");
    }
    SHIPLAP_LT_TRY(on_gpu(report, "x", x));
    SHIPLAP_LT_TRY(on_gpu(report, "packed", packed));
    const Problem problem =
        served(ctx, Problem{x->device.device_id, x->shape[0], out->shape[1], x->shape[1], in,
                            result, kUnscaled, config(ctx, 0, -1), config(ctx, 1, 0)});
    if (trivial(problem)) return clear(ctx, problem, out);
    const SparsePlan* plan = nullptr;
    SHIPLAP_LT_TRY(registry().plan(problem, ctx->stream, report, &plan));
    if (static_cast<size_t>(packed->shape[0]) < plan->compressed) {
      return report.fail(
          SL_INVALID_ARGUMENT, "packed has %lld bytes, a weight of %lld rows of %lld takes %zu",
          static_cast<long long>(packed->shape[0]), static_cast<long long>(problem.n),
          static_cast<long long>(problem.k), plan->compressed);
    }
    SHIPLAP_LT_TRY(check_workspace(ctx, plan->workspace));
    return plan->run(ctx, Operands{address(x), address(packed), nullptr, nullptr, address(out)});
  });
}

}  // namespace

int slidesparse_lt_mm_int8(const sl_context* ctx, const DLTensor* q, const DLTensor* weight,
                           DLTensor* out) {
  return dense_product(ctx, q, weight, nullptr, nullptr, out, kInt8, kInt32);
}

int slidesparse_lt_mm_fp8(const sl_context* ctx, const DLTensor* q, const DLTensor* weight,
                          const DLTensor* scale_q, const DLTensor* scale_weight, DLTensor* out) {
  return dense_product(ctx, q, weight, scale_q, scale_weight, out, kFloat8E4M3, kBFloat16);
}

int slidesparse_lt_sparse_mm_int8(const sl_context* ctx, const DLTensor* q, const DLTensor* packed,
                                  DLTensor* out, int64_t /*n: the rows of out*/, int64_t layout) {
  return sparse_product(ctx, q, packed, out, layout, kInt8, kInt32);
}

int slidesparse_lt_sparse_mm_fp8(const sl_context* ctx, const DLTensor* q, const DLTensor* packed,
                                 DLTensor* out, int64_t /*n*/, int64_t layout) {
  return sparse_product(ctx, q, packed, out, layout, kFloat8E4M3, kBFloat16);
}

int slidesparse_lt_sparse_mm_bf16(const sl_context* ctx, const DLTensor* x, const DLTensor* packed,
                                  DLTensor* out, int64_t /*n*/, int64_t layout) {
  return sparse_product(ctx, x, packed, out, layout, kBFloat16, kBFloat16);
}

int slidesparse_lt_sparse_mm_fp16(const sl_context* ctx, const DLTensor* x, const DLTensor* packed,
                                  DLTensor* out, int64_t /*n*/, int64_t layout) {
  return sparse_product(ctx, x, packed, out, layout, kFloat16, kFloat16);
}

// By these shiplap knows that the library and the declarations belong together.
SL_SIGNATURES
