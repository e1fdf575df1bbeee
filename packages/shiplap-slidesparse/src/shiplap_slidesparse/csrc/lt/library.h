// Vendor libraries: opened by absolute path with RTLD_LOCAL, each symbol looked up once, versions
// checked. Never closed while a plan lives. Two versions of cuSPARSELt can be in one process:
// torch's own is not touched.
#ifndef SHIPLAP_SLIDESPARSE_LT_LIBRARY_H_
#define SHIPLAP_SLIDESPARSE_LT_LIBRARY_H_

#include "report.h"
#include "vendor.h"

namespace shiplap::slidesparse::lt {

struct Version {
  int part[3] = {0, 0, 0};
  int64_t number() const { return part[0] * 1000000 + part[1] * 1000 + part[2]; }
  bool operator<(const Version& other) const {
    for (int i = 0; i < 3; ++i) {
      if (part[i] != other.part[i]) return part[i] < other.part[i];
    }
    return false;
  }
};

// Closes its library when it goes; a table of functions holds one.
class Opened {
 public:
  Opened() = default;
  Opened(const Opened&) = delete;
  Opened& operator=(const Opened&) = delete;
  ~Opened();

  int open(const char* path, const Report& report);
  // Takes part in a library of that name that the process has loaded already.
  bool join(const char* name);
  int find(const char* symbol, void** function, const Report& report) const;

 private:
  void* handle_ = nullptr;
};

#define SHIPLAP_LT_POINTER(name, parameters) Status(*name) parameters = nullptr;

struct Cublaslt {
  SHIPLAP_CUBLASLT(SHIPLAP_LT_POINTER)
  Opened library;
  Version version;
  // "": as torch has loaded it.
  int load(const char* path, const Report& report);
};

struct Cusparselt {
  SHIPLAP_CUSPARSELT(SHIPLAP_LT_POINTER)
  Opened library;
  Version version;
  // Refuses a library older than `oldest`.
  int load(const char* path, const Version& oldest, const Report& report);
};

struct Driver {
  SHIPLAP_DRIVER(SHIPLAP_LT_POINTER)
  Opened library;
  int load(const char* path, const Report& report);
};

#undef SHIPLAP_LT_POINTER

}  // namespace shiplap::slidesparse::lt

#endif  // SHIPLAP_SLIDESPARSE_LT_LIBRARY_H_
