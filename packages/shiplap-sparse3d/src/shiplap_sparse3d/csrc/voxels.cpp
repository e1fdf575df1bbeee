#include "voxels.h"

namespace shiplap::sparse3d {
namespace {

struct Scan {
  int64_t bad_row = -1;
  int64_t count = 0;     // voxels
  bool gaps = false;     // padding before a voxel
  int32_t max_batch = 0;
  bool sorted = true;
  uint64_t max_key = 0;
};

bool inside(const int32_t* c, const Grid& grid) {
  return c[0] >= 0 && c[1] >= 0 && c[1] < grid.size[0] && c[2] >= 0 && c[2] < grid.size[1] &&
         c[3] >= 0 && c[3] < grid.size[2];
}

// Fills `keys`, one a voxel; stops at the first row outside the grid.
Scan make_keys(const int32_t* coords, int64_t n, const Grid& grid, uint64_t* keys) {
  Scan scan;
  uint64_t previous = 0;
  for (int64_t row = 0; row < n; ++row) {
    const int32_t* c = coords + 4 * row;
    if (c[0] == kPadding) continue;
    if (!inside(c, grid)) {
      scan.bad_row = row;
      return scan;
    }
    scan.gaps |= scan.count != row;
    const uint64_t key = grid.key(c[0], c[1], c[2], c[3]);
    scan.max_batch = std::max(scan.max_batch, c[0]);
    scan.max_key = std::max(scan.max_key, key);
    scan.sorted &= key >= previous;
    previous = key;
    keys[scan.count++] = key;
  }
  return scan;
}

void number_voxels(const int32_t* coords, int64_t n, int32_t* rows) {
  for (int64_t row = 0; row < n; ++row) {
    if (coords[4 * row] != kPadding) *rows++ = static_cast<int32_t>(row);
  }
}

int report_outside(const sl_context* ctx, const char* name, const int32_t* c, int64_t row,
                   const Grid& grid) {
  return fail(ctx, SL_INVALID_ARGUMENT,
              "%s row %lld is (%d, %d, %d, %d), outside %s (%lld, %lld, %lld)", name,
              static_cast<long long>(row), c[0], c[1], c[2], c[3], grid.description,
              static_cast<long long>(grid.size[0]), static_cast<long long>(grid.size[1]),
              static_cast<long long>(grid.size[2]));
}

int check_distinct(const sl_context* ctx, const char* name, const int32_t* coords,
                   const SortedVoxels& voxels) {
  for (int64_t i = 1; i < voxels.count; ++i) {
    if (voxels.keys[i] != voxels.keys[i - 1]) continue;
    const int32_t first = voxels.row(i - 1);  // the sort is stable: the lower row comes first
    const int32_t* c = coords + 4 * static_cast<int64_t>(first);
    return fail(ctx, SL_INVALID_ARGUMENT,
                "duplicate coordinates: %srows %d and %d are both (%d, %d, %d, %d)",
                std::strcmp(name, "coords") == 0 ? "" : "out_coords ", first, voxels.row(i), c[0],
                c[1], c[2], c[3]);
  }
  return SL_OK;
}

}  // namespace

int check_cells(const sl_context* ctx, const Grid& grid, int32_t max_batch) {
  unsigned __int128 cells = static_cast<unsigned __int128>(max_batch) + 1;
  for (int axis = 0; axis < 3; ++axis) {
    cells *= static_cast<uint64_t>(grid.size[axis]);  // at most 2^32 * 2^31^3 < 2^128
  }
  if (cells >> 63 == 0) return SL_OK;
  return fail(ctx, SL_INVALID_ARGUMENT,
              "%s (%lld, %lld, %lld) with batch index %d has 2^63 cells or more",
              grid.description, static_cast<long long>(grid.size[0]),
              static_cast<long long>(grid.size[1]), static_cast<long long>(grid.size[2]),
              max_batch);
}

int sort_voxels(const sl_context* ctx, const char* name, const DLTensor* tensor, const Grid& grid,
                Arena& arena, uint32_t* histogram, SortedVoxels* out) {
  const int32_t* coords = data<const int32_t>(tensor);
  const int64_t n = tensor->shape[0];
  KeyRows voxels{arena.take<uint64_t>(n + 1), nullptr};
  const Scan scan = make_keys(coords, n, grid, voxels.keys);
  if (scan.bad_row >= 0) {
    return report_outside(ctx, name, coords + 4 * scan.bad_row, scan.bad_row, grid);
  }
  SL_TRY(check_cells(ctx, grid, scan.max_batch));
  if (!scan.sorted || scan.gaps) {
    voxels.rows = arena.take<int32_t>(n);
    number_voxels(coords, n, voxels.rows);
  }
  if (!scan.sorted) {
    KeyRows scratch{arena.take<uint64_t>(n + 1), arena.take<int32_t>(n)};
    voxels = radix_sort(voxels, scratch, scan.count, bit_length(scan.max_key), histogram);
  }
  voxels.keys[scan.count] = ~uint64_t{0};
  *out = SortedVoxels{voxels.keys, voxels.rows, scan.count};
  return check_distinct(ctx, name, coords, *out);
}

Int3 ConvGeometry::output_shape() const {
  Int3 out;
  for (int axis = 0; axis < 3; ++axis) {
    const int64_t room = shape[axis] + 2 * padding[axis] - dilation[axis] * (kernel[axis] - 1) - 1;
    out.v[axis] = room < 0 ? 0 : room / stride[axis] + 1;
  }
  return out;
}

}  // namespace shiplap::sparse3d
