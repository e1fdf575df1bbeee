/* Entry points for tests: the inner loops on one instruction set (0 baseline, 1 AVX2, 2 AVX-512, 3 that and VNNI),
 * SL_UNSUPPORTED where the machine has it not. No caller outside the repository. */
#ifndef SHIPLAP_SLIDESPARSE_TESTING_H_
#define SHIPLAP_SLIDESPARSE_TESTING_H_

#include "shiplap/abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A tile of at most 16 x 16 sums of products of rows of `depth`; out [rows, 16]. */
SL_EXPORT int slidesparse_dot_int8_isa(const int8_t* left, int64_t rows, const int8_t* right, int64_t columns,
                                       int64_t depth, int32_t* out, int32_t isa);
/* The same by a panel. */
SL_EXPORT int slidesparse_dot_panel_isa(const int8_t* left, int64_t rows, const int8_t* right, int64_t columns,
                                        int64_t depth, int32_t* out, int32_t isa);
SL_EXPORT int slidesparse_dot_float_isa(const float* left, int64_t rows, const float* right, int64_t columns,
                                        int64_t depth, float* out, int32_t isa);
/* `element`: 0 float8, 1 float16, 2 bfloat16, 3 float32, 4 float64. */
SL_EXPORT int slidesparse_widen_isa(const void* from, int32_t element, float* to, int64_t count, int32_t isa);
SL_EXPORT int slidesparse_narrow_isa(const float* row, int64_t count, float inverse, int32_t float8, void* out,
                                     float* largest, int32_t isa);

#ifdef __cplusplus
}
#endif
#endif /* SHIPLAP_SLIDESPARSE_TESTING_H_ */
