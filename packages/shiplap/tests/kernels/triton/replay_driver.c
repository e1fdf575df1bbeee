/* Stands for libcuda.so.1 and libtorch_cuda.so: the harness of replay.h looks at each launch. */
#include <stddef.h>

extern void* harness_launch(void);
extern void* harness_stream(void);

typedef int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);

int cuLaunchKernel(void* f, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c, unsigned shared,
                   void* stream, void** parameters, void** extra) {
  return ((launch)harness_launch())(f, x, y, z, a, b, c, shared, stream, parameters, extra);
}
int cuCtxGetCurrent(void** context) { return *context = &harness_stream, 0; }
int cuGetErrorName(int status, const char** name) { return *name = "CUDA_ERROR_FAKE", status == 0; }
int aoti_torch_get_current_cuda_stream(int device, void** stream) { return *stream = harness_stream(), device; }
#define UNUSED(name) int name(void) { return 999; }
UNUSED(cuModuleLoadData)
UNUSED(cuModuleGetFunction)
UNUSED(cuFuncSetAttribute)
UNUSED(cuCtxSetCurrent)
UNUSED(cuDeviceGet)
UNUSED(cuDeviceGetAttribute)
UNUSED(cuDevicePrimaryCtxRetain)
UNUSED(cuThreadExchangeStreamCaptureMode)
UNUSED(cuMemsetD8Async)
UNUSED(cuMemsetD32Async)
UNUSED(cuMemHostAlloc)
