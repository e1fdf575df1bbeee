/* What Python calls beside the kernels: open the vendor libraries, make plans ahead of time,
 * compress weights.
 *
 * Each returns an sl_status and writes a message to `error`. The device of a problem has to be
 * current.
 */
#ifndef SHIPLAP_SLIDESPARSE_LT_MANAGE_H_
#define SHIPLAP_SLIDESPARSE_LT_MANAGE_H_

#include "shiplap/abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/* lt::Problem of plan.h, field by field. */
typedef struct slidesparse_lt_problem {
  int64_t device, m, n, k;
  int64_t in, out; /* cudaDataType */
  int64_t scaling, algorithm, split_k;
} slidesparse_lt_problem;

/* Absolute paths; "" leaves a library as it is. cuBLASLt, as torch has loaded it, and the driver
 * open themselves. */
SL_EXPORT int slidesparse_lt_open(const char* cublaslt, const char* cusparselt, const char* driver,
                                  const int64_t oldest_cusparselt[3], char* error,
                                  size_t error_size);
/* Major, minor and patch of cuBLASLt, then of cuSPARSELt; -1 where one is not open. */
SL_EXPORT void slidesparse_lt_versions(int64_t versions[6]);
/* Makes the plan, if there is none. info: bytes of workspace, bytes of the compressed weight,
 * number of algorithms. */
SL_EXPORT int slidesparse_lt_prepare(const slidesparse_lt_problem* problem, int32_t sparse,
                                     void* stream, int64_t info[3], char* error, size_t error_size);
/* sizes: bytes of the compressed weight, bytes of scratch. Of the problem device, n, k and in
 * count. */
SL_EXPORT int slidesparse_lt_compressed_size(const slidesparse_lt_problem* problem,
                                             int64_t sizes[2], char* error, size_t error_size);
SL_EXPORT int slidesparse_lt_compress(const slidesparse_lt_problem* problem, const void* weight,
                                      void* compressed, void* scratch, void* stream, char* error,
                                      size_t error_size);
/* x [m, k] times a weight, compressed if `sparse`, for which no op is declared; scales as the
 * problem says, or NULL. */
SL_EXPORT int slidesparse_lt_multiply(const slidesparse_lt_problem* problem, int32_t sparse,
                                      const void* x, const void* weight, const void* scale_x,
                                      const void* scale_weight, void* out, void* workspace,
                                      size_t workspace_size, void* stream, char* error,
                                      size_t error_size);
SL_EXPORT int64_t slidesparse_lt_plans(void);
/* Destroys plans and handles, closes the libraries: for tests, with no call under way and no
 * captured graph left. */
SL_EXPORT void slidesparse_lt_forget(void);

#ifdef __cplusplus
}
#endif
#endif /* SHIPLAP_SLIDESPARSE_LT_MANAGE_H_ */
