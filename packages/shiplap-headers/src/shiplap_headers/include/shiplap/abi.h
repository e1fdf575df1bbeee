/* The C ABI between shiplap and a kernel library.
 *
 * A kernel is one C function:
 *
 *     int NAME(const sl_context* ctx,
 *              const DLTensor* input...,     one per tensor argument, in declared order; NULL stands for None
 *              DLTensor* output...,          allocated by shiplap; mutated arguments are not repeated here
 *              scalars...,                   int -> int64_t, float -> double, bool -> int32_t, str -> const char*,
 *                                            list[int] -> const int64_t* and int64_t, list[float] -> const double* and int64_t
 *              int64_t* extent...);          one per data-dependent dim: the output arrives with its bound as size,
 *                                            the kernel stores how much of it is valid
 *
 * It returns SL_OK, or another status after writing a message to ctx->error. It keeps no state, allocates nothing
 * that outlives the call, throws nothing across this boundary and launches on ctx->stream only. `shiplap header`
 * prints the exact prototypes of a declared op.
 */
#ifndef SHIPLAP_ABI_H_
#define SHIPLAP_ABI_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SL_ABI_VERSION 1

/* Layout-compatible with DLPack 1.x; include dlpack.h first to use its own definitions. */
#ifndef DLPACK_DLPACK_H_
typedef struct {
  int32_t device_type; /* 1 CPU, 2 CUDA */
  int32_t device_id;
} DLDevice;

typedef struct {
  uint8_t code; /* DLPack's; shiplap/dtypes.h has code, bits and lanes of every dtype */
  uint8_t bits;
  uint16_t lanes;
} DLDataType;

typedef struct {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides; /* in elements; shiplap always fills them in */
  uint64_t byte_offset;
} DLTensor;
#endif

typedef struct sl_context {
  uint32_t abi_version; /* SL_ABI_VERSION of the caller */
  int32_t num_threads;  /* at least 1; a CPU kernel uses at most this many threads */
  void* stream;         /* cudaStream_t, or NULL on the CPU */
  void* workspace;      /* 64-byte aligned scratch, content undefined */
  size_t workspace_size;
  char* error; /* message buffer for a status other than SL_OK */
  size_t error_size;
  const int64_t* config; /* compile-time parameters, indexed by the names in the kernel's header; NULL without any */
  size_t config_size;
} sl_context;

enum sl_status {
  SL_OK = 0,
  SL_INVALID_ARGUMENT = 1, /* the caller's values are wrong: duplicate coordinates, an index out of range */
  SL_UNSUPPORTED = 2,      /* a dtype or layout that this kernel does not take */
  SL_INTERNAL = 3          /* anything else */
};

#if defined(_WIN32)
#define SL_EXPORT __declspec(dllexport)
#else
#define SL_EXPORT __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
}
#endif
#endif /* SHIPLAP_ABI_H_ */
