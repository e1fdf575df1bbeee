// subm_table and conv_table: which input voxel lies under each tap of each output voxel.
//
// Both are one walk. Output voxels ("queries") and input voxels are sorted; under a fixed tap the
// wanted input keys rise with the queries, so each run of taps follows the inputs with a cursor.
#include "voxels.h"

namespace shiplap::sparse3d {
namespace {

constexpr int kBlock = 256;  // queries per task: their table rows and state stay in L1/L2

// Neighbouring taps along z that one cursor serves: with dilation 1 the Kz wanted keys are
// consecutive numbers, so they are a contiguous stretch of the sorted inputs.
struct Run {
  int64_t dx, dy, dz;  // offset of the first tap, in voxels
  int64_t length;      // taps in the run
  int64_t first_tap;
};

struct Query {
  uint64_t key;     // input key under tap (0, 0, 0), modulo 2^64
  int64_t x, y, z;  // its coordinates, which may lie outside the grid
  int32_t* taps;    // its row of the table
};

class TableWalk {
 public:
  TableWalk(const ConvGeometry& geometry, const SortedVoxels& inputs, const SortedVoxels& queries,
            const DLTensor* query_coords, int32_t* table)
      : geometry_(geometry),
        grid_{geometry.shape, ""},
        inputs_(inputs),
        queries_(queries),
        query_coords_(data<const int32_t>(query_coords)),
        rows_(query_coords->shape[0]),
        table_(table),
        taps_(geometry.kernel.prod()) {}

  void run(int threads) const {
    if (queries_.count != rows_) clear_padding();
    parallel_for(threads, cdiv(queries_.count, kBlock), [this](int, int64_t task) {
      const int64_t first = task * kBlock;
      fill(first, std::min<int64_t>(kBlock, queries_.count - first));
    });
  }

 private:
  void clear_padding() const {
    for (int64_t row = 0; row < rows_; ++row) {
      if (query_coords_[4 * row] == kPadding) std::fill_n(table_ + row * taps_, taps_, -1);
    }
  }

  void fill(int64_t first, int64_t count) const {
    Query block[kBlock];
    for (int64_t i = 0; i < count; ++i) block[i] = make_query(first + i);
    const Int3 &kernel = geometry_.kernel, &dilation = geometry_.dilation;
    const int64_t run_length = dilation[2] == 1 ? kernel[2] : std::min<int64_t>(1, kernel[2]);
    Run run{0, 0, 0, run_length, 0};
    for (int64_t kx = 0; kx < kernel[0]; ++kx) {
      for (int64_t ky = 0; ky < kernel[1]; ++ky) {
        for (int64_t kz = 0; kz < kernel[2]; kz += run_length) {
          run.dx = kx * dilation[0];
          run.dy = ky * dilation[1];
          run.dz = kz * dilation[2];
          follow(run, block, count);
          run.first_tap += run_length;
        }
      }
    }
  }

  Query make_query(int64_t position) const {
    const int64_t row = queries_.row(position);
    const int32_t* c = query_coords_ + 4 * row;
    Query query;
    query.x = c[1] * geometry_.stride[0] - geometry_.padding[0];
    query.y = c[2] * geometry_.stride[1] - geometry_.padding[1];
    query.z = c[3] * geometry_.stride[2] - geometry_.padding[2];
    query.key = grid_.key(c[0], query.x, query.y, query.z);
    query.taps = table_ + row * taps_;
    std::fill_n(query.taps, taps_, -1);
    return query;
  }

  void follow(const Run& run, const Query* block, int64_t count) const {
    const uint64_t offset = grid_.key(0, run.dx, run.dy, run.dz);
    const auto width = static_cast<uint64_t>(grid_.size[0]);
    const auto height = static_cast<uint64_t>(grid_.size[1]);
    const int64_t depth = grid_.size[2];
    const uint64_t* cursor = nullptr;
    for (int64_t i = 0; i < count; ++i) {
      const Query& query = block[i];
      // A negative coordinate is a huge unsigned one.
      if (static_cast<uint64_t>(query.x + run.dx) >= width) continue;
      if (static_cast<uint64_t>(query.y + run.dy) >= height) continue;
      const int64_t z = query.z + run.dz;
      const int64_t skipped = std::max<int64_t>(0, -z);            // taps below the grid
      const int64_t end = std::min<int64_t>(run.length, depth - z);  // taps above it
      if (skipped >= end) continue;
      // Counted from the first tap inside the grid: from one below it, `wanted` may be -1, the key at the end.
      const uint64_t wanted = query.key + offset + static_cast<uint64_t>(skipped);
      const auto span = static_cast<uint64_t>(end - skipped);
      cursor = advance(cursor, wanted);
      for (const uint64_t* hit = cursor; *hit - wanted < span; ++hit) {
        query.taps[run.first_tap + skipped + static_cast<int64_t>(*hit - wanted)] =
            inputs_.row(hit - inputs_.keys);
      }
    }
  }

  // First input key that is not below `key`; the key of all ones at the end stops the scan.
  const uint64_t* advance(const uint64_t* cursor, uint64_t key) const {
    if (cursor == nullptr) {
      return std::lower_bound(inputs_.keys, inputs_.keys + inputs_.count, key);
    }
    while (*cursor < key) ++cursor;
    return cursor;
  }

  const ConvGeometry& geometry_;
  const Grid grid_;
  const SortedVoxels& inputs_;
  const SortedVoxels& queries_;
  const int32_t* query_coords_;
  const int64_t rows_;  // of the table, padding among them
  int32_t* table_;
  const int64_t taps_;
};

// Below this many table entries a second thread costs more than it saves.
constexpr int64_t kSerialEntries = 50000;

int walk_threads(const sl_context* ctx, int64_t queries, int64_t taps) {
  return queries * taps < kSerialEntries ? 1 : thread_count(ctx);
}

int check_table(const sl_context* ctx, const DLTensor* table, int64_t rows, int64_t taps) {
  SL_TRY(check_int32(ctx, "out", table, 2));
  SL_TRY(check_extent(ctx, "out", table, 0, rows));
  return check_extent(ctx, "out", table, 1, taps);
}

int subm_table(const sl_context* ctx, const DLTensor* coords, DLTensor* out,
               ConvGeometry geometry) {
  for (int axis = 0; axis < 3; ++axis) {
    geometry.padding.v[axis] = geometry.kernel[axis] / 2 * geometry.dilation[axis];
  }
  SL_TRY(check_coords(ctx, "coords", coords));
  const int64_t n = coords->shape[0], taps = geometry.kernel.prod();
  SL_TRY(check_table(ctx, out, n, taps));
  SL_TRY(Arena::require(ctx, 4 * kHistogramSize + sort_voxels_bytes(n)));
  Arena arena(ctx);
  uint32_t* histogram = arena.take<uint32_t>(kHistogramSize);
  SortedVoxels voxels;
  SL_TRY(sort_voxels(ctx, "coords", coords, Grid{geometry.shape, "spatial_shape"}, arena,
                     histogram, &voxels));
  TableWalk(geometry, voxels, voxels, coords, data<int32_t>(out))
      .run(walk_threads(ctx, n, taps));
  return SL_OK;
}

int conv_table(const sl_context* ctx, const DLTensor* coords, const DLTensor* out_coords,
               DLTensor* out, const ConvGeometry& geometry) {
  SL_TRY(check_coords(ctx, "coords", coords));
  SL_TRY(check_coords(ctx, "out_coords", out_coords));
  const int64_t n = coords->shape[0], m = out_coords->shape[0], taps = geometry.kernel.prod();
  SL_TRY(check_table(ctx, out, m, taps));
  SL_TRY(Arena::require(ctx, 4 * kHistogramSize + sort_voxels_bytes(n) + sort_voxels_bytes(m)));
  Arena arena(ctx);
  uint32_t* histogram = arena.take<uint32_t>(kHistogramSize);
  SortedVoxels inputs, queries;
  SL_TRY(sort_voxels(ctx, "coords", coords, Grid{geometry.shape, "spatial_shape"}, arena,
                     histogram, &inputs));
  SL_TRY(sort_voxels(ctx, "out_coords", out_coords,
                     Grid{geometry.output_shape(), "the output grid"}, arena, histogram,
                     &queries));
  TableWalk(geometry, inputs, queries, out_coords, data<int32_t>(out))
      .run(walk_threads(ctx, m, taps));
  return SL_OK;
}

}  // namespace
}  // namespace shiplap::sparse3d

// Workspace: 24 * n + 49472
extern "C" int sparse3d_subm_table(const sl_context* ctx, const DLTensor* coords, DLTensor* out,
                                   const int64_t* spatial_shape, int64_t spatial_shape_len,
                                   const int64_t* kernel, int64_t kernel_len,
                                   const int64_t* dilation, int64_t dilation_len) {
  using namespace shiplap::sparse3d;
  return guarded(ctx, [&] {
    ConvGeometry geometry{};
    geometry.stride = Int3{{1, 1, 1}};
    SL_TRY(read_int3(ctx, "spatial_shape", spatial_shape, spatial_shape_len, 0, &geometry.shape));
    SL_TRY(read_int3(ctx, "kernel", kernel, kernel_len, 0, &geometry.kernel));
    SL_TRY(read_int3(ctx, "dilation", dilation, dilation_len, 1, &geometry.dilation));
    return subm_table(ctx, coords, out, geometry);
  });
}

// Workspace: 24 * (n + m) + 49792
extern "C" int sparse3d_conv_table(const sl_context* ctx, const DLTensor* coords,
                                   const DLTensor* out_coords, DLTensor* out,
                                   const int64_t* spatial_shape, int64_t spatial_shape_len,
                                   const int64_t* kernel, int64_t kernel_len,
                                   const int64_t* stride, int64_t stride_len,
                                   const int64_t* padding, int64_t padding_len,
                                   const int64_t* dilation, int64_t dilation_len) {
  using namespace shiplap::sparse3d;
  return guarded(ctx, [&] {
    ConvGeometry geometry{};
    SL_TRY(read_int3(ctx, "spatial_shape", spatial_shape, spatial_shape_len, 0, &geometry.shape));
    SL_TRY(read_int3(ctx, "kernel", kernel, kernel_len, 0, &geometry.kernel));
    SL_TRY(read_int3(ctx, "stride", stride, stride_len, 1, &geometry.stride));
    SL_TRY(read_int3(ctx, "padding", padding, padding_len, 0, &geometry.padding));
    SL_TRY(read_int3(ctx, "dilation", dilation, dilation_len, 1, &geometry.dilation));
    return conv_table(ctx, coords, out_coords, out, geometry);
  });
}
