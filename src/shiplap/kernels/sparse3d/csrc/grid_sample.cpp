// nearest_map, trilinear_map: rows of the voxels around points. indice_weighted_sum and its
// gradient: features mixed by such rows.
#include <cmath>

#include "voxels.h"

namespace shiplap::sparse3d {
namespace {

constexpr int64_t kBlock = 512;
constexpr int64_t kSerialQueries = 4000;
constexpr int64_t kSerialProducts = 200000;

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

// ---------------------------------------------------------------------------- weighted sums

struct Mix {
  const int32_t* indices;  // [queries, corners]
  const float* weights;
  int64_t queries, corners, channels, rows;

  int threads(const sl_context* ctx) const {
    return queries * corners * channels < kSerialProducts ? 1 : thread_count(ctx);
  }
};

int read_mix(const sl_context* ctx, const DLTensor* indices, const DLTensor* weights,
             int64_t channels, int64_t rows, Mix* out) {
  SL_TRY(check_int32(ctx, "indices", indices, 2));
  SL_TRY(check_float(ctx, "weights", weights, 2));
  if (!has_dtype(weights, 2, 32)) return fail(ctx, SL_UNSUPPORTED, "weights is not float32");
  const int64_t q = indices->shape[0], k = indices->shape[1];
  SL_TRY(check_extent(ctx, "weights", weights, 0, q));
  SL_TRY(check_extent(ctx, "weights", weights, 1, k));
  *out = Mix{data<const int32_t>(indices), data<const float>(weights), q, k, channels, rows};
  for (int64_t i = 0; i < q * k; ++i) {
    if (out->indices[i] >= -1 && out->indices[i] < rows) continue;
    return fail(ctx, SL_INVALID_ARGUMENT, "indices[%lld, %lld] = %d, outside [-1, %lld)",
                static_cast<long long>(i / k), static_cast<long long>(i % k), out->indices[i],
                static_cast<long long>(rows));
  }
  return SL_OK;
}

template <class T>
void add_scaled(T* out, const T* row, T weight, int64_t channels) {
  for (int64_t c = 0; c < channels; ++c) out[c] += weight * row[c];
}

template <class T>
void weighted_sum(const sl_context* ctx, const Mix& mix, const T* feats, T* out) {
  parallel_for(mix.threads(ctx), cdiv(mix.queries, kBlock), [&](int, int64_t task) {
    const int64_t end = std::min(mix.queries, (task + 1) * kBlock);
    for (int64_t q = task * kBlock; q < end; ++q) {
      std::fill_n(out + q * mix.channels, mix.channels, T{0});
      for (int64_t i = q * mix.corners; i < (q + 1) * mix.corners; ++i) {
        if (mix.indices[i] < 0) continue;
        add_scaled(out + q * mix.channels, feats + mix.indices[i] * mix.channels,
                   static_cast<T>(mix.weights[i]), mix.channels);
      }
    }
  });
}

// Entries by the row they go to, in ascending order of entries: a counting sort.
template <class T>
void weighted_sum_grad(const sl_context* ctx, const Mix& mix, const T* grad, int64_t* ends,
                       int64_t* entries, T* out) {
  const int64_t count = mix.queries * mix.corners;
  std::fill_n(ends, mix.rows + 1, 0);
  for (int64_t i = 0; i < count; ++i) {
    if (mix.indices[i] >= 0) ++ends[mix.indices[i] + 1];
  }
  for (int64_t row = 0; row < mix.rows; ++row) ends[row + 1] += ends[row];
  for (int64_t i = 0; i < count; ++i) {
    if (mix.indices[i] >= 0) entries[ends[mix.indices[i]]++] = i;
  }
  // Now ends[row] is where the entries of `row` end, and those of the row before it begin it.
  parallel_for(mix.threads(ctx), cdiv(mix.rows, kBlock), [&](int, int64_t task) {
    const int64_t end = std::min(mix.rows, (task + 1) * kBlock);
    for (int64_t row = task * kBlock; row < end; ++row) {
      T* sum = out + row * mix.channels;
      std::fill_n(sum, mix.channels, T{0});
      for (int64_t at = row == 0 ? 0 : ends[row - 1]; at < ends[row]; ++at) {
        const int64_t i = entries[at];
        add_scaled(sum, grad + i / mix.corners * mix.channels, static_cast<T>(mix.weights[i]),
                   mix.channels);
      }
    }
  });
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

// Workspace: 0
extern "C" int sparse3d_indice_weighted_sum(const sl_context* ctx, const DLTensor* feats,
                                            const DLTensor* indices, const DLTensor* weights,
                                            DLTensor* out) {
  using namespace shiplap::sparse3d;
  return guarded(ctx, [&] {
    Mix mix;
    SL_TRY(check_float(ctx, "feats", feats, 2));
    SL_TRY(check_same_float(ctx, "out", out, 2, feats));
    SL_TRY(read_mix(ctx, indices, weights, feats->shape[1], feats->shape[0], &mix));
    SL_TRY(check_extent(ctx, "out", out, 0, mix.queries));
    SL_TRY(check_extent(ctx, "out", out, 1, mix.channels));
    if (has_dtype(feats, 2, 32)) {
      weighted_sum(ctx, mix, data<const float>(feats), data<float>(out));
    } else {
      weighted_sum(ctx, mix, data<const double>(feats), data<double>(out));
    }
    return static_cast<int>(SL_OK);
  });
}

// Workspace: 8 * (rows + q * k) + 192
extern "C" int sparse3d_indice_weighted_sum_grad(const sl_context* ctx, const DLTensor* grad,
                                                 const DLTensor* indices, const DLTensor* weights,
                                                 DLTensor* out, int64_t rows) {
  using namespace shiplap::sparse3d;
  return guarded(ctx, [&] {
    Mix mix;
    SL_TRY(check_float(ctx, "grad", grad, 2));
    SL_TRY(check_same_float(ctx, "out", out, 2, grad));
    SL_TRY(read_mix(ctx, indices, weights, grad->shape[1], rows, &mix));
    SL_TRY(check_extent(ctx, "grad", grad, 0, mix.queries));
    SL_TRY(check_extent(ctx, "out", out, 0, rows));
    SL_TRY(check_extent(ctx, "out", out, 1, mix.channels));
    SL_TRY(Arena::require(ctx, 8 * (rows + mix.queries * mix.corners) + 192));
    Arena arena(ctx);
    int64_t* ends = arena.take<int64_t>(rows + 1);
    int64_t* entries = arena.take<int64_t>(mix.queries * mix.corners);
    if (has_dtype(grad, 2, 32)) {
      weighted_sum_grad(ctx, mix, data<const float>(grad), ends, entries, data<float>(out));
    } else {
      weighted_sum_grad(ctx, mix, data<const double>(grad), ends, entries, data<double>(out));
    }
    return static_cast<int>(SL_OK);
  });
}
