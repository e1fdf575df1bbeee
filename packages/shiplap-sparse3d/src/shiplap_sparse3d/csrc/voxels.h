// Voxel coordinates as sorted 64-bit keys: the one index structure behind every table.
//
// Sorted keys beat a hash table here: a tap moves every key by the same amount, so looking up one
// tap for all voxels in order is a merge of two sorted sequences - it reads memory forwards, needs
// no probing, and shows duplicates as equal neighbours.
#ifndef SHIPLAP_SPARSE3D_VOXELS_H_
#define SHIPLAP_SPARSE3D_VOXELS_H_

#include "common.h"
#include "radix_sort.h"

namespace shiplap::sparse3d {

// A grid of voxels; key(b, x, y, z) = ((b * X + x) * Y + y) * Z + z.
struct Grid {
  Int3 size;
  const char* description;  // how messages call it: "spatial_shape", "the output grid"

  // Arithmetic modulo 2^64, so offsets may pass through cells that do not exist.
  uint64_t key(int64_t b, int64_t x, int64_t y, int64_t z) const {
    const auto u = [](int64_t value) { return static_cast<uint64_t>(value); };
    return ((u(b) * u(size[0]) + u(x)) * u(size[1]) + u(y)) * u(size[2]) + u(z);
  }
};

// A row whose batch index is this is padding: no voxel.
constexpr int32_t kPadding = -1;

// Refuses a grid whose keys, with batches up to `max_batch`, would not stay below 2^63.
int check_cells(const sl_context* ctx, const Grid& grid, int32_t max_batch);

struct SortedVoxels {
  const uint64_t* keys;  // ascending and distinct, followed by one key of all ones
  const int32_t* rows;   // row of each key; nullptr when the rows came sorted, padding behind them
  int64_t count;         // without padding

  int32_t row(int64_t position) const {
    return rows == nullptr ? static_cast<int32_t>(position) : rows[position];
  }
};

// Workspace of sort_voxels, without the shared histogram.
inline int64_t sort_voxels_bytes(int64_t n) { return 24 * n + 320; }

// Checks that the coordinates are distinct and inside the grid, and sorts them; leaves padding out.
// `histogram` is room for kHistogramSize values.
int sort_voxels(const sl_context* ctx, const char* name, const DLTensor* coords, const Grid& grid,
                Arena& arena, uint32_t* histogram, SortedVoxels* out);

// The five scalars of a convolution; a submanifold one has stride 1 and padding (K // 2) * Dl.
struct ConvGeometry {
  Int3 shape;
  Int3 kernel;
  Int3 stride;
  Int3 padding;
  Int3 dilation;

  Int3 output_shape() const;
};

}  // namespace shiplap::sparse3d

#endif  // SHIPLAP_SPARSE3D_VOXELS_H_
