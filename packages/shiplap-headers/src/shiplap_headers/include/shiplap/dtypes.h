/* Generated from shiplap/dtypes.py by `python -m shiplap.codegen.dtypes`: do not edit.
 *
 * Every dtype that the C ABI carries: torch's name, the number of torch's ScalarType, and DLPack's type code, bits and
 * lanes, as a kernel finds them in DLTensor::dtype.
 */
#ifndef SHIPLAP_DTYPES_H_
#define SHIPLAP_DTYPES_H_

#define SL_DTYPES(X) \
  X(uint8, 0, 1, 8, 1) \
  X(int8, 1, 0, 8, 1) \
  X(int16, 2, 0, 16, 1) \
  X(int32, 3, 0, 32, 1) \
  X(int64, 4, 0, 64, 1) \
  X(float16, 5, 2, 16, 1) \
  X(float32, 6, 2, 32, 1) \
  X(float64, 7, 2, 64, 1) \
  X(complex32, 8, 5, 32, 1) \
  X(complex64, 9, 5, 64, 1) \
  X(complex128, 10, 5, 128, 1) \
  X(bool, 11, 6, 8, 1) \
  X(bfloat16, 15, 4, 16, 1) \
  X(float8_e5m2, 23, 12, 8, 1) \
  X(float8_e4m3fn, 24, 10, 8, 1) \
  X(float8_e5m2fnuz, 25, 13, 8, 1) \
  X(float8_e4m3fnuz, 26, 11, 8, 1) \
  X(uint16, 27, 1, 16, 1) \
  X(uint32, 28, 1, 32, 1) \
  X(uint64, 29, 1, 64, 1) \
  X(float8_e8m0fnu, 44, 14, 8, 1) \
  X(float4_e2m1fn_x2, 45, 17, 4, 2)

#endif /* SHIPLAP_DTYPES_H_ */
