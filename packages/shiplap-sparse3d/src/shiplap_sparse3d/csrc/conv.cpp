// conv: y[j] = bias + sum over taps v of feats[table[j, v]] @ weight[:, v, :].T, group by group
//
// Weights are packed once into panels of at most four vectors of output channels, and as many
// panels of a channel group as fit the L1 cache make a strip. A task is a tile of output rows: its
// hits are sorted by tap, and for each strip every tap's hits are gathered, multiplied and added
// to the tile. An output element sums its taps, and the channels of a tap, in ascending order
// whatever the tiling, so the result does not depend on the thread count.
//
// 16-bit features are widened a few hits at a time, for all strips at once, unless the machine
// multiplies bfloat16 itself; the tile of sums is rounded when it is complete. Depthwise
// convolutions (row_kernels.h) multiply no matrices.
#include "gemm_kernels.h"
#include "hits.h"
#include "sorted_table.h"
#include "testing.h"

namespace shiplap::sparse3d {
namespace {

constexpr int64_t kTileRows = 256;
constexpr int64_t kMinTileRows = 64;
constexpr int64_t kTileRowBytes = 256;      // of a strip; the tile then fits the L2 cache
constexpr int64_t kStripBytes = 16 * 1024;  // of one tap's weights: half an L1 cache
// Below this many multiply-adds (about 50 us of work) a second thread costs more than it saves.
constexpr double kSerialWork = 2e6;

// Of 16-bit features: sums of a tile of all columns, and channels of a few hits.
constexpr int64_t kWideSums = 65536, kWideMinRows = 16;
constexpr int64_t kChunkHits = 64, kChunkSums = 8192, kChunkMinHits = 12;

struct Shape {
  int64_t n, m, taps, ci, co, groups;
  bool reflect;  // tap v takes the weight of tap taps - 1 - v

  int64_t group_ci() const { return ci / groups; }
  int64_t group_co() const { return co / groups; }
  int64_t padded_ci() const { return round_up(ci, kColumnPad); }
  // Each group's columns are padded, for any instruction set.
  int64_t padded_co() const { return groups * round_up(group_co(), kColumnPad); }
  bool depthwise() const { return groups == ci && groups == co && ci > 1; }
};

// Output channels that are multiplied together: `panels` panels of `vectors` vectors.
struct Strip {
  int64_t group;         // of channels
  int64_t first_column;  // within the group
  int64_t columns, valid;
  int64_t panels, vectors;
  int64_t sums_column;  // where the strip starts when all groups are padded to whole vectors
};

template <class S>
class Conv {
 public:
  using T = Sum<S>;
  static constexpr bool kWidened = sizeof(S) != sizeof(T);
  static constexpr bool kPairs = std::is_same_v<S, Bfloat16>;

  static int64_t worker_bytes(const Shape& s) {
    const int64_t lists = HitLists::bytes(kTileRows, s.taps);
    if (!kWidened) return kTileRows * kTileRowBytes + lists;
    return 4 * std::max(kWideSums, kWideMinRows * s.padded_co()) +
           4 * std::max(kChunkSums, kChunkMinHits * s.padded_ci()) + lists;
  }
  static int64_t weight_sums(const Shape& s) { return s.taps * s.group_ci() * s.padded_co(); }
  static int64_t bias_sums(const Shape& s) { return round_up(s.co, kColumnPad); }
  static int64_t workspace_bytes(const Shape& s, int threads) {
    return unsorted_bytes(s.m, s.taps) + (weight_sums(s) + bias_sums(s)) * int64_t{sizeof(T)} +
           threads * worker_bytes(s);
  }

  Conv(const Shape& shape, const IsaKernels& isa, const sl_context* ctx, Arena& arena)
      : s_(shape), isa_(isa), gemm_(isa.gemm(T{})), storage_(isa.of(S{})),
        threads_(thread_count(ctx)), worker_bytes_(worker_bytes(shape)) {
    const double work = static_cast<double>(s_.m) * s_.taps * s_.group_ci() * s_.co;
    if (work < kSerialWork) threads_ = 1;
    const int64_t vectors = cdiv(s_.group_co(), gemm_.lanes);
    panels_ = vectors / gemm_.max_vectors;
    tail_vectors_ = vectors % gemm_.max_vectors;
    const int64_t row_bytes = gemm_.max_vectors * gemm_.lanes * int64_t{sizeof(T)};
    const int64_t fitting = kStripBytes / (row_bytes * std::max<int64_t>(s_.group_ci(), 1));
    strip_panels_ = std::clamp<int64_t>(fitting, 1, kTileRowBytes / row_bytes);
    group_strips_ = cdiv(panels_, strip_panels_) + (tail_vectors_ > 0);
    strips_ = s_.groups * group_strips_;
    sums_columns_ = s_.groups * vectors * gemm_.lanes;
    packed_ = arena.take<T>(weight_sums(s_));
    bias_ = arena.take<T>(bias_sums(s_));
    scratch_ = arena.take<char>(threads_ * worker_bytes_);
  }

  // False when the table has an entry outside [-1, n).
  bool run(const DLTensor* weight, const S* feats, const int32_t* table, const S* bias, S* out) {
    has_bias_ = bias != nullptr;
    std::fill_n(bias_, bias_sums(s_), T(0));
    for (int64_t c = 0; bias != nullptr && c < s_.co; ++c) bias_[c] = widen(bias[c]);
    return s_.depthwise() ? run_depthwise(weight, feats, table, out)
                          : run_product(weight, feats, table, out);
  }

 private:
  bool run_depthwise(const DLTensor* weight, const S* feats, const int32_t* table, S* out) {
    const int64_t stride = round_up(s_.co, kColumnPad);
    for (int64_t tap = 0; tap < s_.taps; ++tap) {
      const S* from = tap_weight(weight, tap);
      T* to = packed_ + tap * stride;
      for (int64_t c = 0; c < s_.co; ++c) to[c] = widen(from[c * weight->strides[0]]);
      std::fill(to + s_.co, to + stride, T(0));
    }
    std::atomic<bool> valid{true};
    parallel_for(threads_, cdiv(s_.m, kTileRows), [&](int, int64_t tile) {
      const int64_t first = tile * kTileRows, rows = std::min(kTileRows, s_.m - first);
      const TableRows<S> at{table + first * s_.taps, s_.taps, rows, s_.taps, s_.n, feats, s_.ci};
      const Depthwise<S> work{at, packed_, stride, bias_, out + first * s_.co};
      if (!storage_.rows.depthwise(work)) valid.store(false, std::memory_order_relaxed);
    });
    return valid.load();
  }

  bool run_product(const DLTensor* weight, const S* feats, const int32_t* table, S* out) {
    parallel_for(threads_, strips_ * s_.taps, [&](int, int64_t task) {
      pack(weight, strip(task / s_.taps), task % s_.taps);
    });
    const int64_t share = round_up(cdiv(s_.m, 4 * threads_), 16);
    const int64_t rows = std::min(std::clamp(share, kMinTileRows, kTileRows), most_rows());
    const int64_t tiles = cdiv(s_.m, rows);
    // Few rows and many channels: share the strips out as well.
    const int64_t splits = tiles >= 2 * threads_ ? 1 : strips_;
    std::atomic<bool> valid{true};
    parallel_for(threads_, tiles * splits, [&](int worker, int64_t task) {
      const int64_t first = task / splits * rows, count = std::min(rows, s_.m - first);
      Arena local(scratch_ + worker * worker_bytes_, worker_bytes_);
      HitLists hits(local, isa_, kTileRows, s_.taps);
      if (!hits.collect(table + first * s_.taps, s_.taps, count, s_.taps, s_.n)) {
        valid.store(false, std::memory_order_relaxed);
        return;
      }
      const Share strips{task % splits, splits};
      if (kWidened && !pairs()) {
        multiply_widened(strips, feats, hits, local, count, out + first * s_.co);
        return;
      }
      T* sums = reinterpret_cast<T*>(local.take<char>(kTileRows * kTileRowBytes));
      for (int64_t i = strips.first; i < strips_; i += strips.step) {
        multiply(strip(i), feats, hits, sums, count, out + first * s_.co);
      }
    });
    return valid.load();
  }

  // Strips first, first + step, ... of all.
  struct Share {
    int64_t first, step;
  };

  int64_t most_rows() const {
    if (!kWidened) return kTileRows;
    if (pairs()) return kTileRows;
    return std::clamp(kWideSums / std::max<int64_t>(sums_columns_, 1), kWideMinRows, kTileRows);
  }

  Strip strip(int64_t index) const {
    const int64_t group = index / group_strips_, width = gemm_.max_vectors * gemm_.lanes;
    const int64_t panel = index % group_strips_ * strip_panels_, column = panel * width;
    const bool tail = panel >= panels_;
    const int64_t first = tail ? panels_ * width : column;
    const int64_t panels = tail ? 1 : std::min(strip_panels_, panels_ - panel);
    const int64_t vectors = tail ? tail_vectors_ : gemm_.max_vectors;
    const int64_t columns = panels * vectors * gemm_.lanes;
    return Strip{group, first, columns, std::min(columns, s_.group_co() - first), panels, vectors,
                 group * (sums_columns_ / s_.groups) + first};
  }

  T* packed(const Strip& strip, int64_t tap) const {
    return packed_ + (s_.taps * strip.sums_column + tap * strip.columns) * s_.group_ci();
  }

  const S* tap_weight(const DLTensor* weight, int64_t tap) const {
    const S* first = data<const S>(weight);  // a weight without elements has no memory
    return first ? first + (s_.reflect ? s_.taps - 1 - tap : tap) * weight->strides[1] : nullptr;
  }

  // Writes a tap's weights as the strip's panels, each [channels of the group, columns of a panel].
  void pack(const DLTensor* weight, const Strip& strip, int64_t tap) const {
    const int64_t width = strip.columns / strip.panels, depth = s_.group_ci();
    const S* from = tap_weight(weight, tap);
    if (from) from += (strip.group * s_.group_co() + strip.first_column) * weight->strides[0];
    T* to = packed(strip, tap);
    const int64_t size = depth * width / (pairs() ? 2 : 1);  // a pair takes the place of a sum
    for (int64_t panel = 0; panel < strip.panels; ++panel, to += size) {
      const int64_t column = panel * width;
      pack_panel(from + column * weight->strides[0], weight->strides[0], weight->strides[2], width,
                 std::min(width, strip.valid - column), to);
    }
  }

  // Transposes [valid, depth] with any strides into [depth, width], padding columns with zeros.
  void pack_panel(const S* from, int64_t column_stride, int64_t depth_stride, int64_t width,
                  int64_t valid, T* to) const {
    const int64_t depth = s_.group_ci();
    if (valid < width) std::fill_n(to, depth * width, T(0));
    if constexpr (kPairs) {
      if (pairs()) return pack_pairs(from, column_stride, depth_stride, width, valid, to);
    }
    constexpr int64_t kBlock = 16;  // either side of a block is a few cache lines
    for (int64_t c0 = 0; c0 < depth; c0 += kBlock) {
      const int64_t c1 = std::min(c0 + kBlock, depth);
      if (column_stride == 1) {
        for (int64_t c = c0; c < c1; ++c) {
          for (int64_t i = 0; i < valid; ++i) to[c * width + i] = widen(from[i + c * depth_stride]);
        }
        continue;
      }
      for (int64_t i = 0; i < valid; ++i) {
        for (int64_t c = c0; c < c1; ++c) {
          to[c * width + i] = widen(from[i * column_stride + c * depth_stride]);
        }
      }
    }
  }

  void pack_pairs(const S* from, int64_t column_stride, int64_t depth_stride, int64_t width,
                  int64_t valid, T* to) const {
    S* pairs = reinterpret_cast<S*>(to);  // [depth / 2, width, 2]
    for (int64_t c = 0; c < s_.group_ci(); ++c) {
      for (int64_t i = 0; i < valid; ++i) {
        pairs[((c / 2) * width + i) * 2 + c % 2] = from[i * column_stride + c * depth_stride];
      }
    }
  }

  // Rows of the strip's sums start as the bias, and as zeros where the strip is padded. Without a bias, rows that follow
  // each other are cleared at once: a call for each short row took a fiftieth of a network's training.
  void start(const Strip& strip, int64_t rows, T* sums, int64_t stride) const {
    if (!has_bias_ && stride == strip.columns) {
      std::fill_n(sums, rows * stride, T(0));
      return;
    }
    const T* bias = bias_ + strip.group * s_.group_co() + strip.first_column;
    for (int64_t row = 0; row < rows; ++row, sums += stride) {
      std::copy_n(bias, strip.valid, sums);
      std::fill(sums + strip.valid, sums + strip.columns, T(0));
    }
  }

  S* columns_of(const Strip& strip, S* out) const {
    return out + strip.group * s_.group_co() + strip.first_column;
  }

  // The strip's columns of `rows` output rows. Sums go straight to the output where they are its
  // elements and the strip fills its columns, else through `sums`.
  void multiply(const Strip& strip, const S* feats, const HitLists& hits, T* sums, int64_t rows,
                S* out) const {
    T* tile = sums;
    int64_t stride = strip.columns;
    if constexpr (!kWidened) {
      if (strip.valid == strip.columns) tile = columns_of(strip, out), stride = s_.co;
    }
    start(strip, rows, tile, stride);
    for (int64_t tap = 0; tap < s_.taps; ++tap) {
      const S* from = feats + strip.group * s_.group_ci();
      if constexpr (kPairs) {
        isa_.gather_pairs[strip.vectors - 1](GatherPairs{
            from, s_.ci, s_.group_ci(), reinterpret_cast<const S*>(packed(strip, tap)),
            strip.panels, tile, stride, hits.list(tap), hits.count(tap)});
      } else if constexpr (!kWidened) {
        gemm_.gather_gemm[strip.vectors - 1](GatherGemm<T>{
            from, s_.ci, s_.group_ci(), packed(strip, tap), strip.panels, tile, stride,
            hits.list(tap), hits.count(tap)});
      }
    }
    if (tile == sums) store(strip, sums, stride, rows, out);
  }

  void store(const Strip& strip, const T* sums, int64_t stride, int64_t rows, S* out) const {
    storage_.store_rows(
        StoreRows<S>{sums, stride, strip.valid, rows, columns_of(strip, out), s_.co});
  }

  // Channels of bfloat16 are multiplied two at a time where the machine does that, if even in number.
  bool pairs() const {
    return kPairs && isa_.gather_pairs[0] != nullptr && s_.group_ci() % 2 == 0;
  }

  void multiply_widened(Share strips, const S* feats, const HitLists& hits, Arena& arena,
                        int64_t rows, S* out) const {
    const int64_t channels = s_.padded_ci();
    const int64_t chunk_hits = std::clamp(kChunkSums / std::max<int64_t>(channels, 1),
                                          kChunkMinHits, kChunkHits);
    T* sums = arena.take<T>(std::max(kWideSums, kWideMinRows * s_.padded_co()));
    T* chunk = arena.take<T>(std::max(kChunkSums, kChunkMinHits * channels));
    for (int64_t i = strips.first; i < strips_; i += strips.step) {
      start(strip(i), rows, sums + strip(i).sums_column, sums_columns_);
    }
    for (int64_t tap = 0; tap < s_.taps; ++tap) {
      for (int64_t done = 0; done < hits.count(tap); done += chunk_hits) {
        const Hit* list = hits.list(tap) + done;
        const int64_t count = std::min(chunk_hits, hits.count(tap) - done);
        storage_.gather_rows(GatherRows<S>{feats, s_.ci, &list->from, count, chunk, channels});
        Hit widened[kChunkHits];
        for (int64_t h = 0; h < count; ++h) widened[h] = Hit{static_cast<int32_t>(h), list[h].to};
        for (int64_t i = strips.first; i < strips_; i += strips.step) {
          const Strip strip = this->strip(i);
          gemm_.gather_gemm[strip.vectors - 1](GatherGemm<T>{
              chunk + strip.group * s_.group_ci(), channels, s_.group_ci(), packed(strip, tap),
              strip.panels, sums + strip.sums_column, sums_columns_, widened, count});
        }
      }
    }
    for (int64_t i = strips.first; i < strips_; i += strips.step) {
      store(strip(i), sums + strip(i).sums_column, sums_columns_, rows, out);
    }
  }

  const Shape s_;
  const IsaKernels& isa_;
  const GemmKernels<T>& gemm_;
  const StorageKernels<S>& storage_;
  int threads_;
  int64_t worker_bytes_;
  int64_t panels_, tail_vectors_, strip_panels_;  // of a group
  int64_t group_strips_, strips_, sums_columns_;
  T* packed_;
  T* bias_;
  bool has_bias_ = false;
  char* scratch_;
};

struct Arguments {
  const DLTensor *feats, *weight, *table, *bias, *order;
  DLTensor* out;
  int64_t groups;
  bool reflect;
};

int check(const sl_context* ctx, const Arguments& a, Shape* shape) {
  SL_TRY(check_number(ctx, "feats", a.feats, 2));
  SL_TRY(check_same_float(ctx, "weight", a.weight, 3, a.feats, false));
  SL_TRY(check_int32(ctx, "table", a.table, 2));
  SL_TRY(check_same_float(ctx, "out", a.out, 2, a.feats));
  *shape = Shape{a.feats->shape[0],  a.table->shape[0], a.table->shape[1], a.feats->shape[1],
                 a.weight->shape[0], a.groups,          a.reflect};
  SL_TRY(check_groups(ctx, a.groups, shape->ci, shape->co));
  SL_TRY(check_extent(ctx, "weight", a.weight, 1, shape->taps));
  SL_TRY(check_extent(ctx, "weight", a.weight, 2, shape->group_ci()));
  SL_TRY(check_extent(ctx, "out", a.out, 0, shape->m));
  SL_TRY(check_extent(ctx, "out", a.out, 1, shape->co));
  if (a.bias == nullptr) return SL_OK;
  SL_TRY(check_same_float(ctx, "bias", a.bias, 1, a.feats));
  return check_extent(ctx, "bias", a.bias, 0, shape->co);
}

template <class S>
int conv(const sl_context* ctx, const Arguments& a, const Shape& shape, const IsaKernels& isa) {
  SL_TRY(Arena::require(ctx, Conv<S>::workspace_bytes(shape, thread_count(ctx))));
  Arena arena(ctx);
  const int32_t* table = nullptr;
  SL_TRY(by_output_row(ctx, a.table, a.order, arena, &table));
  Conv<S> op(shape, isa, ctx, arena);
  const S* bias = a.bias == nullptr ? nullptr : data<const S>(a.bias);
  if (op.run(a.weight, data<const S>(a.feats), table, bias, data<S>(a.out))) return SL_OK;
  return report_bad_entry(ctx, a.table, shape.n);
}

int conv_on(const sl_context* ctx, const Arguments& a, const IsaKernels& isa) {
  return guarded(ctx, [&] {
    Shape shape;
    SL_TRY(check(ctx, a, &shape));
    if (a.feats->dtype.bits == 64) return conv<double>(ctx, a, shape, isa);
    if (a.feats->dtype.bits == 32) return conv<float>(ctx, a, shape, isa);
    return a.feats->dtype.code == 2 ? conv<Half>(ctx, a, shape, isa)
                                    : conv<Bfloat16>(ctx, a, shape, isa);
  });
}

}  // namespace
}  // namespace shiplap::sparse3d

// Workspace, of sums of max(itemsize, 4) bytes:
//   (k * cg * groups * 16 * cdiv(co // groups, 16) + 16 * cdiv(co, 16)) * max(itemsize, 4)
//   + 64 * cdiv(m * k, 16) + threads * (2112 * k + 64 * cdiv(k, 16) + tile)
// where a tile is 65536, of 16-bit features
//   4 * max(65536, 256 * groups * cdiv(co // groups, 16)) + 4 * max(8192, 192 * cdiv(ci, 16))
extern "C" int sparse3d_conv(const sl_context* ctx, const DLTensor* feats, const DLTensor* weight,
                             const DLTensor* table, const DLTensor* bias, const DLTensor* order,
                             const DLTensor*, const DLTensor*, const DLTensor*, const DLTensor*,
                             DLTensor* out, int64_t groups, int32_t reflect, int32_t,
                             int32_t) {
  using namespace shiplap::sparse3d;
  return conv_on(ctx, {feats, weight, table, bias, order, out, groups, reflect != 0},
                 best_kernels());
}

extern "C" int sparse3d_conv_isa(const sl_context* ctx, const DLTensor* feats,
                                 const DLTensor* weight, const DLTensor* table,
                                 const DLTensor* bias, DLTensor* out, int64_t groups, int32_t isa) {
  using namespace shiplap::sparse3d;
  const IsaKernels* kernels = isa_kernels(isa);
  if (kernels == nullptr) return fail(ctx, SL_UNSUPPORTED, "no such instruction set here");
  return conv_on(ctx, {feats, weight, table, bias, nullptr, out, groups, false}, *kernels);
}
