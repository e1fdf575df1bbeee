// nearest_map, trilinear_map: rows of the voxels around points.
#include <cmath>

#include "voxels.h"

namespace shiplap::sparse3d {
namespace {

constexpr int64_t kBlock = 512;
constexpr int64_t kSerialQueries = 4000;

class Finder {
 public:
  Finder(const SortedVoxels& voxels, const Grid& grid) : voxels_(voxels), grid_(grid) {}

  // Row of the voxel at a whole-numbered point, which may be NaN or far away.
  int32_t at(int64_t scene, float x, float y, float z) const {
    if (!(known(x, 0) && known(y, 1) && known(z, 2))) return -1;
    const uint64_t key = grid_.key(scene, static_cast<int64_t>(x), static_cast<int64_t>(y),
                                   static_cast<int64_t>(z));
    const uint64_t* end = voxels_.keys + voxels_.count;
    const uint64_t* hit = std::lower_bound(voxels_.keys, end, key);
    return hit != end && *hit == key ? voxels_.row(hit - voxels_.keys) : -1;
  }

 private:
  bool known(float value, int axis) const {
    return value >= 0 && value < 2147483648.0f && static_cast<int64_t>(value) < grid_.size[axis];
  }

  const SortedVoxels& voxels_;
  const Grid& grid_;
};

// Body(finder, scene, query, position) for each of the [b, l, 3] queries.
template <class Body>
int each_query(const sl_context* ctx, const DLTensor* coords, const DLTensor* queries,
               const int64_t* shape, int64_t shape_len, const Body& body) {
  Grid grid{{}, "spatial_shape"};
  SL_TRY(read_int3(ctx, "spatial_shape", shape, shape_len, 1, &grid.size));
  SL_TRY(check_coords(ctx, "coords", coords));
  SL_TRY(check_float(ctx, "queries", queries, 3));
  SL_TRY(check_extent(ctx, "queries", queries, 2, 3));
  if (!has_dtype(queries, 2, 32)) return fail(ctx, SL_UNSUPPORTED, "queries is not float32");
  SL_TRY(Arena::require(ctx, 4 * kHistogramSize + sort_voxels_bytes(coords->shape[0])));
  Arena arena(ctx);
  uint32_t* histogram = arena.take<uint32_t>(kHistogramSize);
  SortedVoxels voxels;
  SL_TRY(sort_voxels(ctx, "coords", coords, grid, arena, histogram, &voxels));
  const Finder finder(voxels, grid);
  const float* points = data<const float>(queries);
  const int64_t each = queries->shape[1], count = queries->shape[0] * each;
  const int threads = count < kSerialQueries ? 1 : thread_count(ctx);
  parallel_for(threads, cdiv(count, kBlock), [&](int, int64_t task) {
    const int64_t end = std::min(count, (task + 1) * kBlock);
    for (int64_t i = task * kBlock; i < end; ++i) body(finder, i / each, points + 3 * i, i);
  });
  return SL_OK;
}

int check_map(const sl_context* ctx, const char* name, const DLTensor* out, const DLTensor* queries,
              int corners) {
  SL_TRY(check_extent(ctx, name, out, 0, queries->shape[0]));
  SL_TRY(check_extent(ctx, name, out, 1, queries->shape[1]));
  return corners == 1 ? static_cast<int>(SL_OK) : check_extent(ctx, name, out, 2, corners);
}

void interpolate(const Finder& finder, int64_t scene, const float* q, int32_t* rows,
                 float* weights) {
  const float low[3] = {std::floor(q[0] - 0.5f), std::floor(q[1] - 0.5f), std::floor(q[2] - 0.5f)};
  float total = 0;
  for (int corner = 0; corner < 8; ++corner) {
    float cell[3], weight = 1;
    for (int axis = 0; axis < 3; ++axis) {
      cell[axis] = low[axis] + static_cast<float>(corner >> axis & 1);
      weight *= 1 - std::fabs(q[axis] - cell[axis] - 0.5f);
    }
    rows[corner] = finder.at(scene, cell[0], cell[1], cell[2]);
    weights[corner] = rows[corner] < 0 ? 0 : weight;
    total += weights[corner];
  }
  for (int corner = 0; corner < 8; ++corner) weights[corner] /= std::max(total, 1e-12f);
}

}  // namespace
}  // namespace shiplap::sparse3d

// Workspace: 24 * n + 49472
extern "C" int sparse3d_nearest_map(const sl_context* ctx, const DLTensor* coords,
                                    const DLTensor* queries, DLTensor* out,
                                    const int64_t* spatial_shape, int64_t spatial_shape_len) {
  using namespace shiplap::sparse3d;
  return guarded(ctx, [&] {
    SL_TRY(check_int32(ctx, "out", out, 2));
    SL_TRY(check_map(ctx, "out", out, queries, 1));
    int32_t* rows = data<int32_t>(out);
    return each_query(ctx, coords, queries, spatial_shape, spatial_shape_len,
                      [rows](const Finder& finder, int64_t scene, const float* q, int64_t i) {
                        rows[i] = finder.at(scene, std::floor(q[0]), std::floor(q[1]),
                                            std::floor(q[2]));
                      });
  });
}

// Workspace: 24 * n + 49472
extern "C" int sparse3d_trilinear_map(const sl_context* ctx, const DLTensor* coords,
                                      const DLTensor* queries, DLTensor* indices, DLTensor* weights,
                                      const int64_t* spatial_shape, int64_t spatial_shape_len) {
  using namespace shiplap::sparse3d;
  return guarded(ctx, [&] {
    SL_TRY(check_int32(ctx, "indices", indices, 3));
    SL_TRY(check_float(ctx, "weights", weights, 3));
    SL_TRY(check_map(ctx, "indices", indices, queries, 8));
    SL_TRY(check_map(ctx, "weights", weights, queries, 8));
    int32_t* rows = data<int32_t>(indices);
    float* shares = data<float>(weights);
    return each_query(ctx, coords, queries, spatial_shape, spatial_shape_len,
                      [rows, shares](const Finder& finder, int64_t scene, const float* q,
                                     int64_t i) {
                        interpolate(finder, scene, q, rows + 8 * i, shares + 8 * i);
                      });
  });
}
