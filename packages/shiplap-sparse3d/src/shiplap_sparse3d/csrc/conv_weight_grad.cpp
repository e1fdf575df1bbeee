// conv_weight_grad: dW[o, v, c] = sum over rows j of grad[j, o] * feats[table[j, v], c], o and c in
// one group of channels
//
// The work is shared out by what is written, (tap, slice of output channels) units, so no two
// threads add to the same element. Each thread passes over all rows in blocks that stay in cache:
// a block's products are summed in registers and then added to the running sums. Blocks are the
// same for every thread count, and so is the result, bit by bit. Rows of whole vectors are read where
// they lie. Others are copied first: 16-bit rows are widened, and short ones padded. Where there are
// fewer input channels than a vector has lanes, a vector of sums is one of output channels. Depthwise
// convolutions (row_kernels.h) multiply no matrices.
#include "gemm_kernels.h"
#include "hits.h"
#include "sorted_table.h"
#include "testing.h"

namespace shiplap::sparse3d {
namespace {

constexpr int64_t kBlockRows = 512;  // table rows whose hits are collected together
constexpr int64_t kChunkHits = 128;  // hits gathered and multiplied together
constexpr int64_t kCacheBytes = 24 * 1024, kMinHits = 16;  // of rows multiplied where they lie
constexpr double kSerialWork = 2e6;  // multiply-adds below which one thread is faster

struct Shape {
  int64_t n, m, taps, ci, co, groups;
  bool reflect;  // the gradient of tap v is stored as that of tap taps - 1 - v

  int64_t group_ci() const { return ci / groups; }
  int64_t group_co() const { return co / groups; }
  // Whole vectors are read and summed of each group, of the last one beyond the row: where there are
  // groups it is longer. (One more pad would keep rows of whole vectors from their fast copy.)
  int64_t padded_ci() const { return round_up(ci, kColumnPad) + (groups > 1 ? kColumnPad : 0); }
  int64_t padded_group_ci() const { return round_up(group_ci(), kColumnPad); }
  int64_t padded_co() const { return round_up(co, kColumnPad); }
  bool depthwise() const { return groups == ci && groups == co && ci > 1; }
  // Whether sums are rows of output channels, one for each input channel: fewer vectors of them are padding.
  bool turned() const { return groups == 1 && ci * cdiv(co, kColumnPad) < co * cdiv(ci, kColumnPad); }
};

int64_t worker_bytes(const Shape& s, int64_t sum_size) {
  return HitLists::bytes(kBlockRows, s.taps) +
         kChunkHits * (s.padded_ci() + s.padded_co()) * sum_size;
}

// A depthwise gradient needs two rows of sums a tap; that is less.
int64_t workspace_bytes(const Shape& s, int64_t sum_size, int threads) {
  return unsorted_bytes(s.m, s.taps) +
         s.taps * std::max(s.co * s.padded_group_ci(), 2 * s.padded_co()) * sum_size +
         threads * worker_bytes(s, sum_size) + round_up(8 * s.taps, 64);
}

// About how many hits each tap has, from a few blocks of rows: enough to share the work out.
void estimate_hits(const int32_t* table, const Shape& s, int64_t* hits) {
  constexpr int64_t kBlocks = 32, kRows = 32;
  std::fill_n(hits, s.taps, 0);
  const int64_t step = std::max(s.m / kBlocks, kRows);
  for (int64_t first = 0; first < s.m; first += step) {
    const int64_t end = std::min(first + kRows, s.m);
    for (int64_t i = first * s.taps; i < end * s.taps; ++i) hits[i % s.taps] += table[i] >= 0;
  }
}

// One factor of the products: rows of channels, and which of a hit's two rows is its.
template <class S>
struct Side {
  const S* rows;
  int64_t channels, padded;  // padded: as gathered
  bool entries;              // the row that the table's entry names, else the table row, counted from a block's first

  const int32_t* index(const Hit* hits) const { return entries ? &hits->from : &hits->to; }
  const S* block(int64_t first) const { return entries ? rows : rows + first * channels; }
};

// Rows of both sides that are multiplied together: `count` of them, one after the other where there is no index.
template <class R>
struct Rows {
  const R* left;
  int64_t left_stride;
  const int32_t* left_index;
  const R* right;
  int64_t right_stride;
  const int32_t* right_index;
  int64_t count;
};

template <class S>
class WeightGrad {
 public:
  using T = Sum<S>;
  static constexpr bool kWidened = sizeof(S) != sizeof(T);

  WeightGrad(const Shape& shape, const IsaKernels& isa, const S* grad, const S* feats,
             const int32_t* table, S* out)
      : s_(shape), isa_(isa), gemm_(isa.gemm(T{})), storage_(isa.of(S{})), grad_(grad),
        feats_(feats), table_(table), out_(out) {
    const Side<S> outputs{grad, s_.co, s_.padded_co(), false};
    const Side<S> inputs{feats, s_.ci, s_.padded_ci(), true};
    left_ = s_.turned() ? inputs : outputs;
    right_ = s_.turned() ? outputs : inputs;
    width_ = right_.channels / s_.groups;
    stride_ = round_up(width_, kColumnPad);
    // Many passes over few sums each pay for a copy, which saves them the indexing.
    const bool few_passes = gemm_.max_vectors == kMaxVectors || width_ <= gemm_.max_vectors * gemm_.lanes;
    direct_ = !kWidened && width_ % gemm_.lanes == 0 && few_passes;
  }

  // False when the table has an entry outside [-1, n).
  bool run(Arena& arena, int threads) {
    const double work = static_cast<double>(s_.m) * s_.taps * s_.group_ci() * s_.co;
    if (work < kSerialWork) threads = 1;
    if (s_.depthwise()) return run_depthwise(arena, threads);
    int64_t* counts = arena.take<int64_t>(s_.taps);
    // One thread has all units, however many hits they have.
    if (threads > 1) estimate_hits(table_, s_, counts);
    sums_ = arena.take<T>(s_.taps * left_.channels * stride_);
    const int64_t worker_size = worker_bytes(s_, sizeof(T));
    char* scratch = arena.take<char>(threads * worker_size);
    // A few units per thread even out the taps; a slice has at least a register block's rows.
    slices_ = std::clamp<int64_t>(cdiv(4 * threads, std::max<int64_t>(s_.taps, 1)), 1,
                                  std::max<int64_t>(left_.channels / kMinSlice, 1));
    std::atomic<bool> valid{true};
    parallel_for(threads, threads, [&](int worker, int64_t share) {
      const int64_t first = first_unit(counts, share, threads);
      const int64_t end = first_unit(counts, share + 1, threads);
      if (first == end) return;
      Arena local(scratch + worker * worker_size, worker_size);
      if (!sum_units(first, end, local)) valid.store(false, std::memory_order_relaxed);
    });
    return valid.load();
  }

 private:
  static constexpr int64_t kMinSlice = 12;

  // Tasks are runs of taps. Sums of a block of rows are added to the running ones, as above.
  bool run_depthwise(Arena& arena, int threads) const {
    const int64_t stride = s_.padded_co(), tasks = std::min<int64_t>(2 * threads, s_.taps);
    T* totals = arena.take<T>(s_.taps * stride);
    T* sums = arena.take<T>(s_.taps * stride);
    std::fill_n(totals, s_.taps * stride, T(0));
    std::atomic<bool> valid{true};
    parallel_for(threads, tasks, [&](int, int64_t task) {
      const int64_t tap = s_.taps * task / tasks, taps = s_.taps * (task + 1) / tasks - tap;
      T* block = sums + tap * stride;
      for (int64_t row = 0; row < s_.m; row += kBlockRows) {
        const int64_t rows = std::min(kBlockRows, s_.m - row);
        std::fill_n(block, taps * stride, T(0));
        const TableRows<S> at{table_ + row * s_.taps + tap, s_.taps, rows, taps, s_.n, feats_,
                              s_.ci};
        if (!storage_.rows.depthwise_grad(
                DepthwiseGrad<S>{at, grad_ + row * s_.co, block, stride})) {
          valid.store(false, std::memory_order_relaxed);
          return;
        }
        for (int64_t i = 0; i < taps * stride; ++i) totals[tap * stride + i] += block[i];
      }
    });
    for (int64_t tap = 0; tap < s_.taps; ++tap) {
      S* to = out_ + (s_.reflect ? s_.taps - 1 - tap : tap);
      for (int64_t c = 0; c < s_.co; ++c) narrow(totals[tap * stride + c], to + c * s_.taps);
    }
    return valid.load();
  }

  // Unit u is (tap u / slices, slice u % slices). Share i of `shares` ends where the hits before
  // it reach i / shares of all; taps without hits still need their zeros written.
  int64_t first_unit(const int64_t* counts, int64_t share, int64_t shares) const {
    const int64_t units = s_.taps * slices_;
    if (share == shares) return units;
    if (share == 0) return 0;
    int64_t total = 0;
    for (int64_t tap = 0; tap < s_.taps; ++tap) total += counts[tap] + 1;
    int64_t unit = 0;
    double before = 0;
    const double wanted = static_cast<double>(total) * slices_ * share / shares;
    while (unit < units && before + 0.5 * counts[unit / slices_] < wanted) {
      before += counts[unit / slices_] + 1;
      ++unit;
    }
    return unit;
  }

  int64_t slice_start(int64_t slice) const { return left_.channels * slice / slices_; }

  // False when one of the units' table entries is out of range.
  bool sum_units(int64_t first, int64_t end, Arena& arena) const {
    const int64_t first_tap = first / slices_, end_tap = (end - 1) / slices_ + 1;
    HitLists hits(arena, isa_, kBlockRows, s_.taps);
    T* left = arena.take<T>(kChunkHits * left_.padded);
    T* right = arena.take<T>(kChunkHits * right_.padded);
    for (int64_t unit = first; unit < end; ++unit) {
      const auto [row, rows] = unit_rows(unit);
      std::fill_n(sums_ + row * stride_, rows * stride_, T(0));
    }
    for (int64_t row = 0; row < s_.m; row += kBlockRows) {
      const int64_t rows = std::min(kBlockRows, s_.m - row);
      if (!hits.collect(table_ + row * s_.taps + first_tap, s_.taps, rows, end_tap - first_tap,
                        s_.n)) {
        return false;
      }
      for (int64_t tap = first_tap; tap < end_tap; ++tap) {
        const Units units{std::max(first, tap * slices_), std::min(end, (tap + 1) * slices_)};
        const Hit* list = hits.list(tap - first_tap);
        const int64_t count = hits.count(tap - first_tap);
        if (direct_) {
          add_rows(units, list, count, left_.block(row), right_.block(row));
        } else {
          add_copies(units, list, count, row, left, right);
        }
      }
    }
    for (int64_t unit = first; unit < end; ++unit) store(unit);
    return true;
  }

  struct Units {
    int64_t first, end;
  };

  // Adds the products of a tap's hits to the tap's units, from rows where they lie. A few hits at a time stay in the
  // first cache for all register blocks of sums.
  void add_rows(Units units, const Hit* hits, int64_t count, const S* left, const S* right) const {
    const int64_t row_bytes = (left_.channels + right_.channels) * int64_t{sizeof(S)};
    const int64_t some = std::max<int64_t>(kCacheBytes / std::max<int64_t>(row_bytes, 1), kMinHits);
    for (int64_t done = 0; done < count; done += some) {
      const Hit* chunk = hits + done;
      const Rows<S> rows{left, left_.channels, left_.index(chunk), right, right_.channels, right_.index(chunk),
                         std::min(some, count - done)};
      for (int64_t unit = units.first; unit < units.end; ++unit) add_chunk(unit, rows);
    }
  }

  // The same from copies, widened and padded to whole vectors.
  void add_copies(Units units, const Hit* hits, int64_t count, int64_t first, T* left, T* right) const {
    for (int64_t done = 0; done < count; done += kChunkHits) {
      const Hit* chunk = hits + done;
      const int64_t size = std::min(kChunkHits, count - done);
      storage_.gather_rows(GatherRows<S>{left_.block(first), left_.channels, left_.index(chunk),
                                         size, left, left_.padded});
      storage_.gather_rows(GatherRows<S>{right_.block(first), right_.channels, right_.index(chunk),
                                         size, right, right_.padded});
      const Rows<T> rows{left, left_.padded, nullptr, right, right_.padded, nullptr, size};
      for (int64_t unit = units.first; unit < units.end; ++unit) add_chunk(unit, rows);
    }
  }

  struct Span {
    int64_t first, count;
  };

  // Rows of sums_ [taps * left channels, stride_] that belong to a unit.
  Span unit_rows(int64_t unit) const {
    const int64_t slice = unit % slices_, start = slice_start(slice);
    return Span{unit / slices_ * left_.channels + start, slice_start(slice + 1) - start};
  }

  // The unit's rows of sums, group by group.
  template <class R>
  void add_chunk(int64_t unit, const Rows<R>& rows) const {
    const int64_t start = slice_start(unit % slices_), end = slice_start(unit % slices_ + 1);
    const int64_t size = left_.channels / s_.groups;
    T* sums = sums_ + unit / slices_ * left_.channels * stride_;
    for (int64_t o = start; o < end;) {
      const int64_t group = o / size, stop = std::min((group + 1) * size, end);
      add_group(rows, o, stop - o, group * width_, sums + o * stride_);
      o = stop;
    }
  }

  template <class R>
  void add_group(const Rows<R>& from, int64_t row, int64_t rows, int64_t column, T* sums) const {
    const int64_t vectors = cdiv(width_, gemm_.lanes);
    const int64_t panels = cdiv(vectors, gemm_.max_vectors);
    for (int64_t panel = 0; panel < panels; ++panel) {
      const int64_t begin = vectors * panel / panels, end = vectors * (panel + 1) / panels;
      const int64_t at = begin * gemm_.lanes;
      const R *left = from.left + row, *right = from.right + column + at;
      if constexpr (!kWidened) {
        if (direct_) {
          gemm_.gather_outer[end - begin - 1](GatherOuter<T>{
              left, from.left_stride, from.left_index, rows, right, from.right_stride,
              from.right_index, sums + at, stride_, from.count});
          continue;
        }
      }
      if constexpr (std::is_same_v<R, T>) {
        gemm_.outer_sum[end - begin - 1](OuterSum<T>{left, from.left_stride, rows, right,
                                                     from.right_stride, sums + at, stride_,
                                                     from.count});
      }
    }
  }

  void store(int64_t unit) const {
    if (out_ == nullptr) return;  // a gradient without elements has no memory
    const auto [row, rows] = unit_rows(unit);
    const int64_t tap = s_.reflect ? s_.taps - 1 - unit / slices_ : unit / slices_;
    const int64_t start = slice_start(unit % slices_), depth = s_.group_ci();
    const T* sums = sums_ + row * stride_;
    if (!s_.turned()) {
      storage_.store_rows(StoreRows<S>{sums, stride_, depth, rows,
                                       out_ + (start * s_.taps + tap) * depth, s_.taps * depth});
      return;
    }
    for (int64_t o = 0; o < s_.co; ++o) {
      S* to = out_ + (o * s_.taps + tap) * depth + start;
      for (int64_t i = 0; i < rows; ++i) narrow(sums[i * stride_ + o], to + i);
    }
  }

  const Shape s_;
  const IsaKernels& isa_;
  const GemmKernels<T>& gemm_;
  const StorageKernels<S>& storage_;
  const S* grad_;
  const S* feats_;
  const int32_t* table_;
  S* out_;
  Side<S> left_, right_;   // sums have a row for each channel of the left one and a column for each of the right one
  int64_t width_, stride_;  // columns of a group, and as summed
  bool direct_;            // rows are read where they lie
  T* sums_ = nullptr;
  int64_t slices_ = 1;
};

struct Arguments {
  const DLTensor *grad, *feats, *table, *order;
  DLTensor* out;
  int64_t groups;
  bool reflect;
};

int check(const sl_context* ctx, const Arguments& a, Shape* shape) {
  SL_TRY(check_number(ctx, "feats", a.feats, 2));
  SL_TRY(check_same_float(ctx, "grad", a.grad, 2, a.feats));
  SL_TRY(check_int32(ctx, "table", a.table, 2));
  SL_TRY(check_same_float(ctx, "out", a.out, 3, a.feats));
  *shape = Shape{a.feats->shape[0], a.table->shape[0], a.table->shape[1], a.feats->shape[1],
                 a.grad->shape[1],  a.groups,          a.reflect};
  SL_TRY(check_groups(ctx, a.groups, shape->ci, shape->co));
  SL_TRY(check_extent(ctx, "grad", a.grad, 0, shape->m));
  SL_TRY(check_extent(ctx, "out", a.out, 0, shape->co));
  SL_TRY(check_extent(ctx, "out", a.out, 1, shape->taps));
  return check_extent(ctx, "out", a.out, 2, shape->group_ci());
}

template <class S>
int weight_grad(const sl_context* ctx, const Arguments& a, const Shape& shape,
                const IsaKernels& isa) {
  const int threads = thread_count(ctx);
  SL_TRY(Arena::require(ctx, workspace_bytes(shape, sizeof(Sum<S>), threads)));
  Arena arena(ctx);
  const int32_t* table = nullptr;
  SL_TRY(by_output_row(ctx, a.table, a.order, arena, &table));
  WeightGrad<S> op(shape, isa, data<const S>(a.grad), data<const S>(a.feats), table,
                   data<S>(a.out));
  return op.run(arena, threads) ? SL_OK : report_bad_entry(ctx, a.table, shape.n);
}

int weight_grad_on(const sl_context* ctx, const Arguments& a, const IsaKernels& isa) {
  return guarded(ctx, [&] {
    Shape shape;
    SL_TRY(check(ctx, a, &shape));
    if (a.feats->dtype.bits == 64) return weight_grad<double>(ctx, a, shape, isa);
    if (a.feats->dtype.bits == 32) return weight_grad<float>(ctx, a, shape, isa);
    return a.feats->dtype.code == 2 ? weight_grad<Half>(ctx, a, shape, isa)
                                    : weight_grad<Bfloat16>(ctx, a, shape, isa);
  });
}

}  // namespace
}  // namespace shiplap::sparse3d

// Workspace, of sums of max(itemsize, 4) bytes:
//   k * max(co * 16 * cdiv(ci // groups, 16), 32 * cdiv(co, 16)) * max(itemsize, 4)
//   + threads * (2048 * (cdiv(ci, 16) + cdiv(co, 16) + min(1, groups - 1)) * max(itemsize, 4)
//                + 4160 * k + 64 * cdiv(k, 16))
//   + 64 * cdiv(k, 8) + 64 * cdiv(m * k, 16)
extern "C" int sparse3d_conv_weight_grad(const sl_context* ctx, const DLTensor* grad,
                                         const DLTensor* feats, const DLTensor* table,
                                         const DLTensor* order, const DLTensor*, const DLTensor*,
                                         DLTensor* out, int64_t groups, int32_t reflect, int32_t) {
  using namespace shiplap::sparse3d;
  return weight_grad_on(ctx, {grad, feats, table, order, out, groups, reflect != 0},
                        best_kernels());
}

extern "C" int sparse3d_conv_weight_grad_isa(const sl_context* ctx, const DLTensor* grad,
                                             const DLTensor* feats, const DLTensor* table,
                                             DLTensor* out, int64_t groups, int32_t isa) {
  using namespace shiplap::sparse3d;
  const IsaKernels* kernels = isa_kernels(isa);
  if (kernels == nullptr) return fail(ctx, SL_UNSUPPORTED, "no such instruction set here");
  return weight_grad_on(ctx, {grad, feats, table, nullptr, out, groups, false}, *kernels);
}
