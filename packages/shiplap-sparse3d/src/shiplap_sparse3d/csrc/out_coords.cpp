// out_coords and out_coords_bounded: the output voxels of a strided convolution, sorted.
//
// Every input proposes at most prod(ceil(K / (S / gcd(S, Dl)))) outputs and most proposals repeat.
// They go through a hash set that starts at twice the number of inputs and doubles into the next
// stretch of the workspace when half full, so time and touched memory follow the number of
// outputs found, not their bound; the set is then sorted.
#include <numeric>

#include "voxels.h"

namespace shiplap::sparse3d {
namespace {

constexpr int64_t kMinCapacity = 16;

int64_t pow2ceil(int64_t value) {
  return value <= 1 ? 1 : int64_t{1} << bit_length(static_cast<uint64_t>(value - 1));
}

class KeySet {
 public:
  // `room` holds at least twice pow2ceil(2 * the number of distinct keys) values.
  KeySet(uint64_t* room, int64_t capacity) { start(room, capacity); }

  void insert(uint64_t key) {
    uint64_t* slot = find(key);
    if (*slot == key) return;
    *slot = key;
    if (2 * ++size_ > capacity_) grow();
  }

  int64_t size() const { return size_; }

  void copy_to(uint64_t* keys) const {
    for (const uint64_t* slot = slots_; slot != slots_ + capacity_; ++slot) {
      if (*slot != kEmpty) *keys++ = *slot;
    }
  }

 private:
  static constexpr uint64_t kEmpty = ~uint64_t{0};
  static constexpr uint64_t kInLine = 7;  // 8 keys make a cache line

  void start(uint64_t* room, int64_t capacity) {
    slots_ = room;
    capacity_ = capacity;
    std::fill_n(slots_, capacity_, kEmpty);
  }

  // Eight neighbours along z share a cache line; lines are spread by a multiplicative hash.
  uint64_t home(uint64_t key) const {
    const uint64_t line = (key >> 3) * 0x9E3779B97F4A7C15u;
    const int line_bits = bit_length(static_cast<uint64_t>(capacity_)) - 4;
    return (line >> (64 - line_bits)) << 3 | (key & kInLine);
  }

  // The key's slot, or the empty one where it belongs; at least half of all slots are empty.
  uint64_t* find(uint64_t key) const {
    const uint64_t mask = static_cast<uint64_t>(capacity_) - 1;
    uint64_t index = home(key);
    while (slots_[index] != key && slots_[index] != kEmpty) index = (index + 1) & mask;
    return slots_ + index;
  }

  void grow() {
    const uint64_t* old = slots_;
    const int64_t old_capacity = capacity_;
    start(slots_ + capacity_, 2 * capacity_);
    for (int64_t i = 0; i < old_capacity; ++i) {
      if (old[i] != kEmpty) *find(old[i]) = old[i];
    }
  }

  uint64_t* slots_;
  int64_t capacity_;
  int64_t size_ = 0;
};

// The outputs that one coordinate reaches along one axis: o with o * S = x + P - k * Dl for a tap
// k. Kept until another coordinate is asked for: sorted voxels change x and y seldom.
class AxisReach {
 public:
  AxisReach(const ConvGeometry& geometry, int axis, int64_t* room)
      : kernel_(geometry.kernel[axis]), stride_(geometry.stride[axis]),
        padding_(geometry.padding[axis]), step_(geometry.dilation[axis] / stride_),
        step_rest_(geometry.dilation[axis] % stride_), size_(geometry.output_shape()[axis]),
        outputs_(room) {}

  void move_to(int64_t coordinate) {
    if (coordinate == coordinate_) return;
    coordinate_ = coordinate;
    count_ = 0;
    // One division; then each tap moves the quotient and the rest on.
    int64_t quotient = (coordinate + padding_) / stride_;
    int64_t rest = (coordinate + padding_) % stride_;
    for (int64_t tap = 0; tap < kernel_; ++tap) {
      if (rest == 0 && quotient >= 0 && quotient < size_) outputs_[count_++] = quotient;
      quotient -= step_;
      rest -= step_rest_;
      if (rest < 0) {
        rest += stride_;
        --quotient;
      }
    }
  }

  const int64_t* begin() const { return outputs_; }
  const int64_t* end() const { return outputs_ + count_; }

 private:
  int64_t kernel_, stride_, padding_, step_, step_rest_, size_;
  int64_t* outputs_;
  int64_t coordinate_ = -1;  // no voxel's
  int64_t count_ = 0;
};

void propose(const SortedVoxels& voxels, const int32_t* coords, const ConvGeometry& geometry,
             const Grid& output_grid, int64_t* reach_room, KeySet* set) {
  AxisReach x(geometry, 0, reach_room);
  AxisReach y(geometry, 1, reach_room + geometry.kernel[0]);
  AxisReach z(geometry, 2, reach_room + geometry.kernel[0] + geometry.kernel[1]);
  for (int64_t i = 0; i < voxels.count; ++i) {
    const int32_t* c = coords + 4 * static_cast<int64_t>(voxels.row(i));
    x.move_to(c[1]);
    y.move_to(c[2]);
    z.move_to(c[3]);
    for (const int64_t out_x : x) {
      for (const int64_t out_y : y) {
        for (const int64_t out_z : z) set->insert(output_grid.key(c[0], out_x, out_y, out_z));
      }
    }
  }
}

void write_coords(const uint64_t* keys, int64_t m, const Grid& grid, int32_t* out) {
  const auto size = [&](int axis) { return static_cast<uint64_t>(grid.size[axis]); };
  for (int64_t i = 0; i < m; ++i, out += 4) {
    uint64_t key = keys[i];
    for (int axis = 2; axis >= 0; --axis) {
      out[axis + 1] = static_cast<int32_t>(key % size(axis));
      key /= size(axis);
    }
    out[0] = static_cast<int32_t>(key);
  }
}

int64_t outputs_per_input(const ConvGeometry& geometry) {
  int64_t outputs = 1;
  for (int axis = 0; axis < 3; ++axis) {
    const int64_t stride = geometry.stride[axis];
    outputs *= cdiv(geometry.kernel[axis], stride / std::gcd(stride, geometry.dilation[axis]));
  }
  return outputs;
}

int32_t highest_batch(const int32_t* coords, int64_t n) {
  int32_t highest = 0;
  for (int64_t row = 0; row < n; ++row) highest = std::max(highest, coords[4 * row]);
  return highest;
}

// Fills the first *m rows of `out`; when there are more than that, the status is `too_many`.
int out_coords(const sl_context* ctx, const DLTensor* coords, DLTensor* out,
               const ConvGeometry& geometry, int64_t* m, int too_many) {
  SL_TRY(check_coords(ctx, "coords", coords));
  SL_TRY(check_coords(ctx, "out", out));
  const int64_t n = coords->shape[0], bound = n * outputs_per_input(geometry);
  const int64_t taps = geometry.kernel[0] + geometry.kernel[1] + geometry.kernel[2];
  const int64_t capacity = pow2ceil(std::max(2 * bound, kMinCapacity));
  SL_TRY(Arena::require(ctx, 4 * kHistogramSize + sort_voxels_bytes(n) + 8 * taps + 16 * capacity +
                                 16 * bound + 192));
  Arena arena(ctx);
  uint32_t* histogram = arena.take<uint32_t>(kHistogramSize);
  SortedVoxels voxels;
  SL_TRY(sort_voxels(ctx, "coords", coords, Grid{geometry.shape, "spatial_shape"}, arena,
                     histogram, &voxels));
  const int32_t* rows = data<const int32_t>(coords);
  const Grid grid{geometry.output_shape(), "the output grid"};
  SL_TRY(check_cells(ctx, grid, highest_batch(rows, n)));
  int64_t* reach_room = arena.take<int64_t>(taps);
  // The set may need less than it was given room for, never more: it doubles at half its
  // capacity, so it ends at most at pow2ceil(2 * size).
  const int64_t first_capacity = std::min(capacity, pow2ceil(std::max(2 * n, kMinCapacity)));
  KeySet set(arena.take<uint64_t>(2 * capacity), first_capacity);
  propose(voxels, rows, geometry, grid, reach_room, &set);
  *m = set.size();
  if (*m > out->shape[0]) {
    return fail(ctx, too_many, "more than %lld output voxels, which is the capacity",
                static_cast<long long>(out->shape[0]));
  }
  KeyRows keys{arena.take<uint64_t>(bound), nullptr};
  KeyRows scratch{arena.take<uint64_t>(bound), nullptr};
  set.copy_to(keys.keys);
  const uint64_t cells = grid.key(highest_batch(rows, n) + int64_t{1}, 0, 0, 0);
  keys = radix_sort(keys, scratch, *m, bit_length(cells), histogram);
  write_coords(keys.keys, *m, grid, data<int32_t>(out));
  return SL_OK;
}

int out_coords_bounded(const sl_context* ctx, const DLTensor* coords, DLTensor* reached,
                       DLTensor* count, const ConvGeometry& geometry, int64_t capacity) {
  SL_TRY(check_int32(ctx, "count", count, 1));
  SL_TRY(check_extent(ctx, "count", count, 0, 1));
  SL_TRY(check_extent(ctx, "reached", reached, 0, capacity));
  int64_t m = 0;
  SL_TRY(out_coords(ctx, coords, reached, geometry, &m, SL_INVALID_ARGUMENT));
  std::fill_n(data<int32_t>(reached) + 4 * m, 4 * (capacity - m), kPadding);
  *data<int32_t>(count) = static_cast<int32_t>(m);
  return SL_OK;
}

struct List {
  const int64_t* values;
  int64_t length;
};

int read_geometry(const sl_context* ctx, List spatial_shape, List kernel, List stride,
                  List padding, List dilation, ConvGeometry* out) {
  SL_TRY(read_int3(ctx, "spatial_shape", spatial_shape.values, spatial_shape.length, 0, &out->shape));
  SL_TRY(read_int3(ctx, "kernel", kernel.values, kernel.length, 0, &out->kernel));
  SL_TRY(read_int3(ctx, "stride", stride.values, stride.length, 1, &out->stride));
  SL_TRY(read_int3(ctx, "padding", padding.values, padding.length, 0, &out->padding));
  return read_int3(ctx, "dilation", dilation.values, dilation.length, 1, &out->dilation);
}

}  // namespace
}  // namespace shiplap::sparse3d

// With bound = n * prod(cdiv(kernel, stride // gcd(stride, dilation))), workspace of both:
//   24 * n + 16 * pow2ceil(max(2 * bound, 16)) + 16 * bound
//   + 8 * (kernel[0] + kernel[1] + kernel[2]) + 49664
extern "C" int sparse3d_out_coords(const sl_context* ctx, const DLTensor* coords, DLTensor* out,
                                   const int64_t* spatial_shape, int64_t spatial_shape_len,
                                   const int64_t* kernel, int64_t kernel_len,
                                   const int64_t* stride, int64_t stride_len,
                                   const int64_t* padding, int64_t padding_len,
                                   const int64_t* dilation, int64_t dilation_len, int64_t* m) {
  using namespace shiplap::sparse3d;
  return guarded(ctx, [&] {
    ConvGeometry geometry{};
    SL_TRY(read_geometry(ctx, {spatial_shape, spatial_shape_len}, {kernel, kernel_len},
                         {stride, stride_len}, {padding, padding_len}, {dilation, dilation_len},
                         &geometry));
    return out_coords(ctx, coords, out, geometry, m, SL_INTERNAL);
  });
}

extern "C" int sparse3d_out_coords_bounded(
    const sl_context* ctx, const DLTensor* coords, DLTensor* reached, DLTensor* count,
    const int64_t* spatial_shape, int64_t spatial_shape_len, const int64_t* kernel,
    int64_t kernel_len, const int64_t* stride, int64_t stride_len, const int64_t* padding,
    int64_t padding_len, const int64_t* dilation, int64_t dilation_len, int64_t capacity) {
  using namespace shiplap::sparse3d;
  return guarded(ctx, [&] {
    ConvGeometry geometry{};
    SL_TRY(read_geometry(ctx, {spatial_shape, spatial_shape_len}, {kernel, kernel_len},
                         {stride, stride_len}, {padding, padding_len}, {dilation, dilation_len},
                         &geometry));
    return out_coords_bounded(ctx, coords, reached, count, geometry, capacity);
  });
}
