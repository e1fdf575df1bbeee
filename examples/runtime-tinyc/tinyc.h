/* A vendor's library: kernels in plain C, of float32, on dense row-major memory. It
 * knows nothing of torch. */
#ifndef TINYC_H
#define TINYC_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* out[i] = a[i] op b[i]; op is one of + - * / >, which gives 1 or 0, and g, the gate: 0
 * where a[i] <= 0, else b[i] */
void tinyc_binary(char op, const float* a, const float* b, float* out, int64_t n);
/* out[i] = f(a[i]); f is r (relu), t (tanh), e (exp) */
void tinyc_unary(char f, const float* a, float* out, int64_t n);
/* out[rows, columns] = a[rows, inner] b[inner, columns] */
void tinyc_matmul(const float* a, const float* b, float* out, int64_t rows,
                  int64_t inner, int64_t columns);
/* out[rows] = sums of the rows of in[rows, columns] */
void tinyc_sum(const float* in, float* out, int64_t rows, int64_t columns);
/* out[rows, columns] = softmax of the rows of in[rows, columns] */
void tinyc_softmax(const float* in, float* out, int64_t rows, int64_t columns);

#ifdef __cplusplus
}
#endif
#endif
