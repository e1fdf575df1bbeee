/* A CUDA driver without a device: it loads any image, and tells the test about each launch. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef void (*launched)(const char* name, const unsigned* numbers, void* stream, void** parameters);
static launched listener;
static int fills, loads, contexts, architecture = 90, failing;
static char names[64][128];
static void* context;

void fake_listen(launched function) { listener = function; }
void fake_fail(int status) { failing = status; }
void fake_architecture(int number) { architecture = number; }
int fake_loads(void) { return loads; }
int fake_fills(void) { return fills; }
int fake_contexts(void) { return contexts; }

int cuModuleLoadData(void** module, const void* image) {
  if (memcmp(image, "\177ELF", 4) != 0) return 200;
  ++loads;
  *module = &loads;
  return 0;
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
  strncpy(names[loads % 64], name, 127);
  *function = names[loads % 64];
  return module != &loads;
}
int cuFuncSetAttribute(void* function, int which, int value) { return function == 0 || which != 8 || value <= 49152; }
int cuCtxGetCurrent(void** current) { return *current = context, 0; }
int cuCtxSetCurrent(void* given) { return context = given, 0; }
int cuDeviceGet(int* device, int index) { return *device = index, 0; }
int cuDeviceGetAttribute(int* value, int which, int device) {
  *value = which == 75 ? architecture / 10 : architecture % 10;
  return device != 0;
}
int cuDevicePrimaryCtxRetain(void** primary, int device) { return ++contexts, *primary = &contexts, device; }
int cuThreadExchangeStreamCaptureMode(int* mode) {
  static int now = 0;
  const int before = now;
  now = *mode;
  *mode = before;
  return 0;
}
int cuMemsetD8Async(uint64_t at, unsigned char value, size_t count, void* stream) {
  ++fills;
  return memset((void*)at, value, count), stream != 0;
}
int cuMemsetD32Async(uint64_t at, unsigned value, size_t count, void* stream) {
  ++fills;
  for (size_t i = 0; i < count; ++i) ((unsigned*)at)[i] = value;
  return stream != 0;
}
int cuMemHostAlloc(void** memory, size_t size, unsigned flags) {
  return *memory = calloc(1, size), flags != 3;
}
int cuGetErrorName(int status, const char** name) { return *name = "CUDA_ERROR_FAKE", status == 0; }
int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void* stream, void** parameters, void** extra) {
  const unsigned numbers[] = {x, y, z, bx, by, bz, shared};
  if (failing) return failing;
  if (listener) listener(function, numbers, stream, parameters);
  return extra != 0;
}
