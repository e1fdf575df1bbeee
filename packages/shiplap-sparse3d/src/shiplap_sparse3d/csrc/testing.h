/* Entry points for tests and benchmarks: an op on one instruction set (0 baseline, 1 AVX2,
 * 2 AVX-512, 3 that and AVX-512-BF16), SL_UNSUPPORTED where the machine has it not. No caller
 * outside the repository. */
#ifndef SHIPLAP_SPARSE3D_TESTING_H_
#define SHIPLAP_SPARSE3D_TESTING_H_

#include "sparse3d.h"

#ifdef __cplusplus
extern "C" {
#endif

SL_EXPORT int sparse3d_conv_isa(const sl_context* ctx, const DLTensor* feats,
                                const DLTensor* weight, const DLTensor* table,
                                const DLTensor* bias, DLTensor* out, int64_t groups, int32_t isa);

SL_EXPORT int sparse3d_conv_weight_grad_isa(const sl_context* ctx, const DLTensor* grad,
                                            const DLTensor* feats, const DLTensor* table,
                                            DLTensor* out, int64_t groups, int32_t isa);

#ifdef __cplusplus
}
#endif
#endif /* SHIPLAP_SPARSE3D_TESTING_H_ */
