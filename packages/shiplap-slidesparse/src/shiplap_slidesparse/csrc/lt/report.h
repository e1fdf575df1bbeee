// Error texts in memory of the caller: no thread-local buffer, nothing that outlives the call.
#ifndef SHIPLAP_SLIDESPARSE_LT_REPORT_H_
#define SHIPLAP_SLIDESPARSE_LT_REPORT_H_

#include <cstdarg>
#include <cstdio>

#include "shiplap/abi.h"

namespace shiplap::slidesparse::lt {

class Report {
 public:
  Report(char* text, size_t size) : text_(text), size_(text == nullptr ? 0 : size) {}
  explicit Report(const sl_context* ctx) : Report(ctx->error, ctx->error_size) {}

  // Writes a printf-style message and returns `status`.
  [[gnu::format(printf, 3, 4)]] int fail(int status, const char* format, ...) const {
    if (size_ == 0) return status;
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text_, size_, format, arguments);
    va_end(arguments);
    return status;
  }

 private:
  char* text_;
  size_t size_;
};

// Runs `body` and turns an exception into a status: none may cross the C boundary.
template <class Body>
int guarded(const Report& report, const Body& body) noexcept {
  try {
    return body();
  } catch (...) {
    return report.fail(SL_INTERNAL, "out of host memory");
  }
}

#define SHIPLAP_LT_TRY(expression)                            \
  do {                                                        \
    const int shiplap_lt_status = (expression);               \
    if (shiplap_lt_status != SL_OK) return shiplap_lt_status; \
  } while (0)

}  // namespace shiplap::slidesparse::lt

#endif  // SHIPLAP_SLIDESPARSE_LT_REPORT_H_
