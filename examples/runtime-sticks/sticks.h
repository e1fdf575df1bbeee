/* A library for an accelerator that knows float16 only, and no strides: a matrix lies in "sticks" of 64 bytes.
   A matrix of `rows` and `cols` is ceil(cols / 32) columns of sticks. Stick (c, r) holds the elements 32 c to
   32 c + 31 of row r, the last ones padded with zeros. */
#pragma once
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif
size_t st_size(int64_t rows, int64_t cols); /* elements, with the padding */
void st_pack(const void* dense, void* sticks, int64_t rows, int64_t cols);
void st_unpack(const void* sticks, void* dense, int64_t rows, int64_t cols);
/* op is one of + - * /, of g (>=) l (<=) > < =, or of M (max) m (min) */
void st_binary(char op, const void* a, const void* b, void* out, int64_t rows, int64_t cols);
/* n: -x, e: exp, l: log, s: sqrt, R: 1 / sqrt, t: tanh, g: sigmoid, r: relu, G: gelu, S: silu, a: abs */
void st_unary(char op, const void* a, void* out, int64_t rows, int64_t cols);
void st_matmul(const void* a, const void* b, void* out, int64_t m, int64_t k, int64_t n);
void st_reduce(char op, const void* a, void* out, int64_t rows, int64_t cols); /* + M: out is rows x 1 */
void st_softmax(const void* a, void* out, int64_t rows, int64_t cols);
#ifdef __cplusplus
}
#endif
