// conv: y[j] = bias + sum over taps v of feats[table[j, v]] @ weight[:, v, :].T
//
// Weights are packed once into panels of at most four vectors of output channels, and as many
// panels as fit the L1 cache make a group. A task is a tile of output rows: its hits are sorted by
// tap, and for each group every tap's hits are gathered, multiplied and added to the tile. An
// output element sums its taps, and the channels of a tap, in ascending order whatever the
// tiling, so the result does not depend on the thread count.
#include "gemm_kernels.h"
#include "hits.h"
#include "testing.h"

namespace shiplap::sparse3d {
namespace {

constexpr int64_t kTileRows = 256;
constexpr int64_t kMinTileRows = 64;
constexpr int64_t kTileRowBytes = 256;      // of a group; the tile then fits the L2 cache
constexpr int64_t kGroupBytes = 16 * 1024;  // of one tap's weights: half an L1 cache
// Below this many multiply-adds (about 50 us of work) a second thread costs more than it saves.
constexpr double kSerialWork = 2e6;

int64_t tile_bytes(int64_t taps) {
  return kTileRows * kTileRowBytes + HitLists::bytes(kTileRows, taps);
}

struct Shape {
  int64_t n, m, taps, ci, co;
  bool reflect;  // tap v takes the weight of tap taps - 1 - v
};

// Output channels that are multiplied together: `panels` panels of `vectors` vectors.
struct Group {
  int64_t first_column, columns, panels, vectors;
};

template <class T>
class Conv {
 public:
  Conv(const Shape& shape, const IsaKernels& isa, const sl_context* ctx, Arena& arena)
      : s_(shape), isa_(isa), kernels_(isa.of(T{})), threads_(thread_count(ctx)) {
    const double work = static_cast<double>(s_.m) * s_.taps * s_.ci * s_.co;
    if (work < kSerialWork) threads_ = 1;
    const int64_t vectors = cdiv(s_.co, kernels_.lanes);
    panels_ = vectors / kernels_.max_vectors;
    tail_vectors_ = vectors % kernels_.max_vectors;
    const int64_t row_bytes = kernels_.max_vectors * kernels_.lanes * int64_t{sizeof(T)};
    const int64_t fitting = kGroupBytes / (row_bytes * std::max<int64_t>(s_.ci, 1));
    group_panels_ = std::clamp<int64_t>(fitting, 1, kTileRowBytes / row_bytes);
    groups_ = cdiv(panels_, group_panels_) + (tail_vectors_ > 0);
    packed_ = arena.take<T>(packed_size(s_));
    scratch_ = arena.take<char>(threads_ * tile_bytes(s_.taps));
  }

  static int64_t packed_size(const Shape& s) { return s.taps * s.ci * round_up(s.co, kColumnPad); }

  // False when the table has an entry outside [-1, n).
  bool run(const DLTensor* weight, const T* feats, const int32_t* table, const T* bias, T* out) {
    parallel_for(threads_, groups_ * s_.taps, [&](int, int64_t task) {
      pack(weight, group(task / s_.taps), task % s_.taps);
    });
    const int64_t share = round_up(cdiv(s_.m, 4 * threads_), 16);
    const int64_t rows = std::clamp(share, kMinTileRows, kTileRows);
    const int64_t tiles = cdiv(s_.m, rows);
    // Few rows and many channels: share the groups out as well.
    const int64_t splits = tiles >= 2 * threads_ ? 1 : groups_;
    std::atomic<bool> valid{true};
    parallel_for(threads_, tiles * splits, [&](int worker, int64_t task) {
      const int64_t first = task / splits * rows, count = std::min(rows, s_.m - first);
      Arena local(scratch_ + worker * tile_bytes(s_.taps), tile_bytes(s_.taps));
      T* sums = reinterpret_cast<T*>(local.take<char>(kTileRows * kTileRowBytes));
      HitLists hits(local, isa_, kTileRows, s_.taps);
      if (!hits.collect(table + first * s_.taps, s_.taps, count, s_.taps, s_.n)) {
        valid.store(false, std::memory_order_relaxed);
        return;
      }
      for (int64_t g = task % splits; g < groups_; g += splits) {
        multiply(group(g), feats, hits, bias, sums, count, out + first * s_.co);
      }
    });
    return valid.load();
  }

 private:
  Group group(int64_t index) const {
    const int64_t first = index * group_panels_, width = kernels_.max_vectors * kernels_.lanes;
    if (first >= panels_) {
      return Group{panels_ * width, tail_vectors_ * kernels_.lanes, 1, tail_vectors_};
    }
    const int64_t panels = std::min(group_panels_, panels_ - first);
    return Group{first * width, panels * width, panels, kernels_.max_vectors};
  }

  T* packed(const Group& group, int64_t tap) const {
    return packed_ + (s_.taps * group.first_column + tap * group.columns) * s_.ci;
  }

  // Writes a tap's weights as the group's panels, each [ci, columns of a panel].
  void pack(const DLTensor* weight, const Group& group, int64_t tap) const {
    const int64_t* strides = weight->strides;
    const int64_t from = s_.reflect ? s_.taps - 1 - tap : tap;
    const int64_t width = group.columns / group.panels;
    T* to = packed(group, tap);
    for (int64_t panel = 0; panel < group.panels; ++panel, to += s_.ci * width) {
      const int64_t column = group.first_column + panel * width;
      pack_panel(data<const T>(weight) + column * strides[0] + from * strides[1], strides[0],
                 strides[2], width, std::min(width, s_.co - column), to);
    }
  }

  // Transposes [valid, ci] with any strides into [ci, width], padding columns with zeros.
  void pack_panel(const T* from, int64_t column_stride, int64_t depth_stride, int64_t width,
                  int64_t valid, T* to) const {
    if (valid < width) std::fill_n(to, s_.ci * width, T(0));
    if (column_stride == 1) {
      for (int64_t c = 0; c < s_.ci; ++c) {
        std::copy_n(from + c * depth_stride, valid, to + c * width);
      }
      return;
    }
    constexpr int64_t kBlock = 16;  // either side of a block is a few cache lines
    for (int64_t c0 = 0; c0 < s_.ci; c0 += kBlock) {
      const int64_t c1 = std::min(c0 + kBlock, s_.ci);
      for (int64_t column = 0; column < valid; ++column) {
        for (int64_t c = c0; c < c1; ++c) {
          to[c * width + column] = from[column * column_stride + c * depth_stride];
        }
      }
    }
  }

  // The group's columns of `rows` output rows. Sums go straight to the output where the group
  // fills its columns, through `sums` where its last vector reaches beyond them.
  void multiply(const Group& group, const T* feats, const HitLists& hits, const T* bias, T* sums,
                int64_t rows, T* out) const {
    const int64_t valid = std::min(group.columns, s_.co - group.first_column);
    const bool direct = valid == group.columns;
    T* tile = direct ? out + group.first_column : sums;
    const int64_t stride = direct ? s_.co : group.columns;
    for (int64_t row = 0; row < rows; ++row) {
      T* to = tile + row * stride;
      if (bias == nullptr) {
        std::fill_n(to, valid, T(0));
      } else {
        std::copy_n(bias + group.first_column, valid, to);
      }
      if (!direct) std::fill(to + valid, to + group.columns, T(0));
    }
    for (int64_t tap = 0; tap < s_.taps; ++tap) {
      kernels_.gather_gemm[group.vectors - 1](GatherGemm<T>{feats, s_.ci, packed(group, tap),
                                                            group.panels, tile, stride,
                                                            hits.list(tap), hits.count(tap)});
    }
    if (direct) return;
    for (int64_t row = 0; row < rows; ++row) {
      std::copy_n(sums + row * stride, valid, out + row * s_.co + group.first_column);
    }
  }

  const Shape s_;
  const IsaKernels& isa_;
  const GemmKernels<T>& kernels_;
  int threads_;
  int64_t panels_, tail_vectors_, group_panels_, groups_;
  T* packed_;
  char* scratch_;
};

int check(const sl_context* ctx, const DLTensor* feats, const DLTensor* weight,
          const DLTensor* table, const DLTensor* bias, const DLTensor* out, bool reflect,
          Shape* shape) {
  SL_TRY(check_float(ctx, "feats", feats, 2));
  SL_TRY(check_same_float(ctx, "weight", weight, 3, feats, false));
  SL_TRY(check_int32(ctx, "table", table, 2));
  SL_TRY(check_same_float(ctx, "out", out, 2, feats));
  *shape = Shape{feats->shape[0], table->shape[0], table->shape[1], feats->shape[1],
                 weight->shape[0],  reflect};
  SL_TRY(check_extent(ctx, "weight", weight, 1, shape->taps));
  SL_TRY(check_extent(ctx, "weight", weight, 2, shape->ci));
  SL_TRY(check_extent(ctx, "out", out, 0, shape->m));
  SL_TRY(check_extent(ctx, "out", out, 1, shape->co));
  if (bias == nullptr) return SL_OK;
  SL_TRY(check_same_float(ctx, "bias", bias, 1, feats));
  return check_extent(ctx, "bias", bias, 0, shape->co);
}

template <class T>
int conv(const sl_context* ctx, const DLTensor* feats, const DLTensor* weight,
         const DLTensor* table, const DLTensor* bias, DLTensor* out, const Shape& shape,
         const IsaKernels& kernels) {
  const int64_t packed = Conv<T>::packed_size(shape) * int64_t{sizeof(T)};
  SL_TRY(Arena::require(ctx, packed + thread_count(ctx) * tile_bytes(shape.taps)));
  Arena arena(ctx);
  Conv<T> op(shape, kernels, ctx, arena);
  const T* bias_data = bias == nullptr ? nullptr : data<const T>(bias);
  if (op.run(weight, data<const T>(feats), data<const int32_t>(table), bias_data, data<T>(out))) {
    return SL_OK;
  }
  return report_bad_entry(ctx, table, shape.n);
}

int conv_on(const sl_context* ctx, const DLTensor* feats, const DLTensor* weight,
            const DLTensor* table, const DLTensor* bias, DLTensor* out, bool reflect,
            const IsaKernels& kernels) {
  return guarded(ctx, [&] {
    Shape shape;
    SL_TRY(check(ctx, feats, weight, table, bias, out, reflect, &shape));
    return feats->dtype.bits == 32
               ? conv<float>(ctx, feats, weight, table, bias, out, shape, kernels)
               : conv<double>(ctx, feats, weight, table, bias, out, shape, kernels);
  });
}

}  // namespace
}  // namespace shiplap::sparse3d

// Workspace: k * ci * 16 * cdiv(co, 16) * itemsize
//            + threads * (65536 + 2112 * k + 64 * cdiv(k, 16))
extern "C" int sparse3d_conv(const sl_context* ctx, const DLTensor* feats, const DLTensor* weight,
                             const DLTensor* table, const DLTensor* bias, const DLTensor* order,
                             const DLTensor*, const DLTensor*, const DLTensor*, const DLTensor*,
                             DLTensor* out, int64_t groups, int32_t reflect, int32_t) {
  using namespace shiplap::sparse3d;
  if (order != nullptr || groups != 1) {
    return fail(ctx, SL_UNSUPPORTED, "sorted tables and groups");
  }
  return conv_on(ctx, feats, weight, table, bias, out, reflect != 0, best_kernels());
}

extern "C" int sparse3d_conv_isa(const sl_context* ctx, const DLTensor* feats,
                                 const DLTensor* weight, const DLTensor* table,
                                 const DLTensor* bias, DLTensor* out, int32_t isa) {
  using namespace shiplap::sparse3d;
  const IsaKernels* kernels = isa_kernels(isa);
  if (kernels == nullptr) return fail(ctx, SL_UNSUPPORTED, "no such instruction set here");
  return conv_on(ctx, feats, weight, table, bias, out, false, *kernels);
}
