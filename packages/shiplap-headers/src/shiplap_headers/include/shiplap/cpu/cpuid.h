// What GCC and Clang do not both ask the CPU for by name.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>

namespace shiplap {

// Whether the CPU converts between float16 and float32. Clang 14 does not take "f16c" in __builtin_cpu_supports.
inline bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C) != 0;
}

}  // namespace shiplap
#endif
