// Inner products of rows, one build per instruction set (dot_<isa>.cpp, flags in CMakeLists.txt). Everything in
// dot_impl.h has internal linkage: a template that the linker could merge would carry AVX-512 code into the baseline.
#pragma once

#include <cstdint>

namespace shiplap::slidesparse {

constexpr int64_t kTileRows = 16, kTileColumns = 16;  // of the largest tile that a call fills

// out[r, c] = sum over depth of left[r, :] * right[c, :]
template <class T, class Sum>
struct Dots {
  const T* left;
  int64_t left_stride;
  int64_t rows;
  const T* right;
  int64_t right_stride;
  int64_t columns;
  int64_t depth;
  Sum* out;  // [rows, kTileColumns]
};

// What is stored, widened to float.
enum Element : int32_t { kFloat8 = 0, kFloat16 = 1, kBfloat16 = 2, kFloat32 = 3, kFloat64 = 4, kElementCount = 5 };

// A row of floats, as 8-bit numbers: rounded to the nearest after the product with `inverse`, within the limit.
struct Quantise {
  const float* row;
  int64_t count;
  float inverse;
  void* out;
};

// Four bytes of a row that are multiplied apart, and their place.
struct Carried {
  int32_t four, bytes;
};

// Rows as panels are multiplied with them.
struct PanelRows {
  int64_t stride;    // of the bytes, a multiple of 32
  int8_t* bytes;     // [rows, stride]
  Carried* carried;  // [rows, stride / 4], of which `carries` are there
  int32_t* carries;
  int32_t* excess;  // what comes off each sum of the row
};

// Products of many rows with weights in panels: four bytes of each of 16 rows of the weight side by side, [depth / 4, 16, 4].
// As exact as dot_int8. Null where an instruction set has none.
struct Panels {
  void (*take_row)(const int8_t* from, int64_t depth, int64_t row, const PanelRows& rows);
  void (*fill)(const int8_t* right, int64_t columns, int64_t depth, uint8_t* panel);  // 1 to 16 rows of the weight
  // At most 16 rows. `next`: 16 * depth bytes that are going to be read, or any memory.
  void (*dot)(const PanelRows& rows, int64_t depth, int64_t row, int64_t count, const uint8_t* panel, const void* next,
              int32_t* out);
};

struct Kernels {
  void (*dot_int8)(const Dots<int8_t, int32_t>&);  // exact, for depths up to 131,071
  Panels panels;
  void (*dot_float)(const Dots<float, float>&);
  void (*widen[kElementCount])(const void* from, float* to, int64_t count);
  float (*largest)(const float* row, int64_t count);  // of the magnitudes; NaN if there is one
  void (*to_int8)(const Quantise&);
  void (*to_float8)(const Quantise&);
};

enum Isa : int32_t { kBaseline = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Vnni = 3, kIsaCount = 4 };

const Kernels& baseline_kernels();
const Kernels& avx2_kernels();  // x86-64 only, like the next
const Kernels& avx512_kernels();
const Kernels& avx512vnni_kernels();

// Kernels of one instruction set, or nullptr when this machine cannot run it.
const Kernels* isa_kernels(int32_t isa);
// Kernels of the best instruction set of this machine.
const Kernels& best_kernels();

}  // namespace shiplap::slidesparse
