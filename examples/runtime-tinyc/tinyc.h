/* A vendor's library: kernels in plain C, of float32, on dense row-major memory. It knows nothing of torch. */
#ifndef TINYC_H
#define TINYC_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* out[i] = a[i] op b[i]; op is one of + - * / and g, the gate: 0 where a[i] <= 0, else b[i] */
void tinyc_binary(char op, const float* a, const float* b, float* out, int64_t n);
/* out[i] = f(a[i]); f is r (relu), t (tanh), e (exp) */
void tinyc_unary(char f, const float* a, float* out, int64_t n);
/* out[rows, columns] = a[rows, inner] b[inner, columns] */
void tinyc_matmul(const float* a, const float* b, float* out, int64_t rows, int64_t inner, int64_t columns);
/* A copy between two layouts. A stride of 0 repeats an element of `in`. */
void tinyc_copy(const float* in, const int64_t* in_strides, float* out, const int64_t* out_strides, const int64_t* sizes,
                int64_t rank);
/* Adds each element of `in` (dense) to where `out_strides` says: a stride of 0 sums over a dim. */
void tinyc_add_to(const float* in, float* out, const int64_t* out_strides, const int64_t* sizes, int64_t rank);

#ifdef __cplusplus
}
#endif
#endif
