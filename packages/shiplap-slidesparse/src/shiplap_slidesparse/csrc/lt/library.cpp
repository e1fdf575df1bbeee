#include "library.h"

#include <dlfcn.h>

namespace shiplap::slidesparse::lt {

Opened::~Opened() {
  if (handle_ != nullptr) dlclose(handle_);
}

int Opened::open(const char* path, const Report& report) {
  handle_ = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (handle_ != nullptr) return SL_OK;
  const char* why = dlerror();
  return report.fail(SL_UNSUPPORTED, "%s", why == nullptr ? path : why);
}

bool Opened::join(const char* name) {
  handle_ = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  return handle_ != nullptr;
}

int Opened::find(const char* symbol, void** function, const Report& report) const {
  *function = dlsym(handle_, symbol);
  return *function != nullptr ? static_cast<int>(SL_OK)
                              : report.fail(SL_UNSUPPORTED, "no function %s", symbol);
}

#define SHIPLAP_LT_FIND(name, parameters) \
  SHIPLAP_LT_TRY(library.find(#name, reinterpret_cast<void**>(&name), report));

namespace {

template <class Property>
int read_version(Property property, Version* version, const Report& report) {
  for (int field = 0; field < 3; ++field) {  // MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL
    if (property(field, &version->part[field]) != 0)
      return report.fail(SL_UNSUPPORTED, "the library hides its version");
  }
  return SL_OK;
}

}  // namespace

int Cublaslt::load(const char* path, const Report& report) {
  if (path[0] != 0) {
    SHIPLAP_LT_TRY(library.open(path, report));
  } else if (!library.join("libcublasLt.so.13") && !library.join("libcublasLt.so.12")) {
    return report.fail(SL_UNSUPPORTED,
                       "this process has loaded neither libcublasLt.so.13 nor libcublasLt.so.12");
  }
  SHIPLAP_CUBLASLT(SHIPLAP_LT_FIND)
  return read_version(cublasLtGetProperty, &version, report);
}

int Cusparselt::load(const char* path, const Version& oldest, const Report& report) {
  SHIPLAP_LT_TRY(library.open(path, report));
  SHIPLAP_CUSPARSELT(SHIPLAP_LT_FIND)
  SHIPLAP_LT_TRY(read_version(cusparseLtGetProperty, &version, report));
  if (!(version < oldest)) return SL_OK;
  return report.fail(SL_UNSUPPORTED, "cuSPARSELt %d.%d.%d is older than %d.%d.%d", version.part[0],
                     version.part[1], version.part[2], oldest.part[0], oldest.part[1],
                     oldest.part[2]);
}

int Driver::load(const char* path, const Report& report) {
  SHIPLAP_LT_TRY(library.open(path[0] != 0 ? path : "libcuda.so.1", report));
  SHIPLAP_DRIVER(SHIPLAP_LT_FIND)
  return SL_OK;
}

}  // namespace shiplap::slidesparse::lt
