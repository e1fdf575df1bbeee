// conv: y[j] = bias + sum over taps v of feats[table[j, v]] @ weight[:, v, :].T
//
// Weights are packed once into panels of at most four vectors of output channels. A task is a
// tile of output rows: its hits are grouped by tap, and for each panel every tap's hits are
// gathered and multiplied into an accumulator tile that stays in cache. An output element sums
// its taps, and the channels of a tap, in ascending order whatever the tiling, so the result does
// not depend on the thread count.
#include "gemm_kernels.h"
#include "hits.h"
#include "testing.h"

namespace shiplap::sparse3d {
namespace {

constexpr int64_t kTileRows = 256;
constexpr int64_t kMinTileRows = 64;
// Below this many multiply-adds (about 50 us of work) a second thread costs more than it saves.
constexpr double kSerialWork = 2e6;

int64_t tile_bytes(int64_t taps) {
  return kTileRows * kMaxPanelBytes + HitLists::bytes(kTileRows, taps);
}

struct Shape {
  int64_t n, m, taps, ci, co;
};

template <class T>
class Conv {
 public:
  Conv(const Shape& shape, const GemmKernels<T>& kernels, Arena& arena, int threads)
      : s_(shape), kernels_(kernels), arena_(arena), threads_(threads) {
    const double work = static_cast<double>(s_.m) * s_.taps * s_.ci * s_.co;
    if (work < kSerialWork) threads_ = 1;
    vectors_ = cdiv(s_.co, kernels_.lanes);
    panels_ = cdiv(vectors_, kernels_.max_vectors);
    packed_ = arena_.take<T>(s_.taps * s_.ci * round_up(s_.co, kColumnPad));
  }

  // False when the table has an entry outside [-1, n).
  bool run(const DLTensor* weight, const T* feats, const int32_t* table, const T* bias, T* out) {
    pack(weight);
    const int64_t share = round_up(cdiv(s_.m, 4 * threads_), 16);
    const int64_t rows = std::clamp(share, kMinTileRows, kTileRows);
    const int64_t tiles = cdiv(s_.m, rows);
    // Few rows and many channels: share the panels out as well.
    const int64_t splits = tiles >= 2 * threads_ ? 1 : panels_;
    char* workspace = arena_.take<char>(threads_ * tile_bytes(s_.taps));
    std::atomic<bool> valid{true};
    parallel_for(threads_, tiles * splits, [&](int worker, int64_t task) {
      const int64_t tile = task / splits, split = task % splits;
      Arena local(workspace + worker * tile_bytes(s_.taps), tile_bytes(s_.taps));
      HitLists hits(local, kTileRows, s_.taps);
      T* sums = reinterpret_cast<T*>(local.take<char>(kTileRows * kMaxPanelBytes));
      const int64_t first = tile * rows, count = std::min(rows, s_.m - first);
      if (!hits.collect(table + first * s_.taps, s_.taps, count, s_.taps, s_.n)) {
        valid.store(false, std::memory_order_relaxed);
        return;
      }
      for (int64_t p = split; p < panels_; p += splits) {
        multiply(p, feats, hits, count, sums);
        store(p, sums, count, bias, out + first * s_.co);
      }
    });
    return valid.load();
  }

 private:
  int64_t first_vector(int64_t panel) const { return vectors_ * panel / panels_; }
  int64_t panel_vectors(int64_t panel) const {
    return first_vector(panel + 1) - first_vector(panel);
  }
  T* packed(int64_t panel, int64_t tap) const {
    const int64_t before = s_.taps * first_vector(panel) + tap * panel_vectors(panel);
    return packed_ + before * s_.ci * kernels_.lanes;
  }

  void pack(const DLTensor* weight) {
    const T* values = data<const T>(weight);
    const int64_t* strides = weight->strides;
    parallel_for(threads_, panels_ * s_.taps, [&](int, int64_t task) {
      const int64_t panel = task / s_.taps, tap = task % s_.taps;
      const int64_t first = first_vector(panel) * kernels_.lanes;
      const int64_t columns = panel_vectors(panel) * kernels_.lanes;
      pack_block(values + first * strides[0] + tap * strides[1], strides[0], strides[2], columns,
                 std::min(columns, s_.co - first), packed(panel, tap));
    });
  }

  // Transposes [valid, ci] with any strides into [ci, columns], padding columns with zeros.
  void pack_block(const T* from, int64_t column_stride, int64_t depth_stride, int64_t columns,
                  int64_t valid, T* to) const {
    constexpr int64_t kBlock = 16;  // a block of either side is a few cache lines wide
    for (int64_t c0 = 0; c0 < s_.ci; c0 += kBlock) {
      const int64_t c1 = std::min(c0 + kBlock, s_.ci);
      if (column_stride == 1) {
        for (int64_t c = c0; c < c1; ++c) {
          std::copy_n(from + c * depth_stride, valid, to + c * columns);
        }
      } else {
        for (int64_t column = 0; column < valid; ++column) {
          for (int64_t c = c0; c < c1; ++c) {
            to[c * columns + column] = from[column * column_stride + c * depth_stride];
          }
        }
      }
      for (int64_t c = c0; c < c1; ++c) {
        std::fill(to + c * columns + valid, to + (c + 1) * columns, T(0));
      }
    }
  }

  void multiply(int64_t panel, const T* feats, const HitLists& hits, int64_t rows, T* sums) const {
    const int64_t width = panel_vectors(panel);
    std::fill_n(sums, rows * width * kernels_.lanes, T(0));
    for (int64_t tap = 0; tap < s_.taps; ++tap) {
      if (hits.count(tap) == 0) continue;
      kernels_.gather_gemm[width - 1](GatherGemm<T>{feats, s_.ci, packed(panel, tap), sums,
                                                    hits.from(tap), hits.to(tap),
                                                    hits.count(tap)});
    }
  }

  void store(int64_t panel, const T* sums, int64_t rows, const T* bias, T* out) const {
    const int64_t first = first_vector(panel) * kernels_.lanes;
    const int64_t columns = panel_vectors(panel) * kernels_.lanes;
    const int64_t valid = std::min(columns, s_.co - first);
    for (int64_t row = 0; row < rows; ++row, sums += columns) {
      T* to = out + row * s_.co + first;
      if (bias == nullptr) {
        std::copy_n(sums, valid, to);
      } else {
        for (int64_t column = 0; column < valid; ++column) {
          to[column] = sums[column] + bias[first + column];
        }
      }
    }
  }

  const Shape s_;
  const GemmKernels<T>& kernels_;
  Arena& arena_;
  int threads_;
  int64_t vectors_, panels_;
  T* packed_;
};

int check(const sl_context* ctx, const DLTensor* feats, const DLTensor* weight,
          const DLTensor* table, const DLTensor* bias, const DLTensor* out, Shape* shape) {
  SL_TRY(check_float(ctx, "feats", feats, 2));
  SL_TRY(check_same_float(ctx, "weight", weight, 3, feats, false));
  SL_TRY(check_int32(ctx, "table", table, 2));
  SL_TRY(check_same_float(ctx, "out", out, 2, feats));
  *shape = Shape{feats->shape[0], table->shape[0], table->shape[1], feats->shape[1],
                 weight->shape[0]};
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
  const int64_t packed = shape.taps * shape.ci * round_up(shape.co, kColumnPad);
  const int threads = thread_count(ctx);
  SL_TRY(Arena::require(ctx, packed * static_cast<int64_t>(sizeof(T)) +
                                 threads * tile_bytes(shape.taps)));
  Arena arena(ctx);
  Conv<T> op(shape, kernels.of(T{}), arena, threads);
  const T* bias_data = bias == nullptr ? nullptr : data<const T>(bias);
  if (op.run(weight, data<const T>(feats), data<const int32_t>(table), bias_data, data<T>(out))) {
    return SL_OK;
  }
  return report_bad_entry(ctx, table, shape.n);
}

int conv_on(const sl_context* ctx, const DLTensor* feats, const DLTensor* weight,
            const DLTensor* table, const DLTensor* bias, DLTensor* out,
            const IsaKernels& kernels) {
  return guarded(ctx, [&] {
    Shape shape;
    SL_TRY(check(ctx, feats, weight, table, bias, out, &shape));
    return feats->dtype.bits == 32
               ? conv<float>(ctx, feats, weight, table, bias, out, shape, kernels)
               : conv<double>(ctx, feats, weight, table, bias, out, shape, kernels);
  });
}

}  // namespace
}  // namespace shiplap::sparse3d

// Workspace: k * ci * 16 * cdiv(co, 16) * itemsize + threads * (65536 + 2048 * k + 64 * cdiv(k, 16))
extern "C" int sparse3d_conv(const sl_context* ctx, const DLTensor* feats, const DLTensor* weight,
                             const DLTensor* table, const DLTensor* bias,
                             [[maybe_unused]] const DLTensor* table_t, DLTensor* out) {
  using namespace shiplap::sparse3d;
  return conv_on(ctx, feats, weight, table, bias, out, best_kernels());
}

extern "C" int sparse3d_conv_isa(const sl_context* ctx, const DLTensor* feats,
                                 const DLTensor* weight, const DLTensor* table,
                                 const DLTensor* bias, [[maybe_unused]] const DLTensor* table_t,
                                 DLTensor* out, int32_t isa) {
  using namespace shiplap::sparse3d;
  const IsaKernels* kernels = isa_kernels(isa);
  if (kernels == nullptr) return fail(ctx, SL_UNSUPPORTED, "no such instruction set here");
  return conv_on(ctx, feats, weight, table, bias, out, *kernels);
}
