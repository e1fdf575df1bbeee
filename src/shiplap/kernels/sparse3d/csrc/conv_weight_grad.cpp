// conv_weight_grad: dW[o, v, c] = sum over rows j of grad[j, o] * feats[table[j, v], c]
//
// The work is shared out by what is written, (tap, slice of output channels) units, so no two
// threads add to the same element. Each thread passes over all rows in blocks that stay in cache:
// a block's products are summed in registers and then added to the running sums. Blocks are the
// same for every thread count, and so is the result, bit by bit.
#include "gemm_kernels.h"
#include "hits.h"
#include "testing.h"

namespace shiplap::sparse3d {
namespace {

constexpr int64_t kBlockRows = 512;  // table rows whose hits are collected together
constexpr int64_t kChunkHits = 128;  // hits gathered and multiplied together
constexpr double kSerialWork = 2e6;  // multiply-adds below which one thread is faster

struct Shape {
  int64_t n, m, taps, ci, co;
  bool reflect;  // the gradient of tap v is stored as that of tap taps - 1 - v

  int64_t padded_ci() const { return round_up(ci, kColumnPad); }
  int64_t padded_co() const { return round_up(co, kColumnPad); }
};

int64_t worker_bytes(const Shape& s, int64_t itemsize) {
  return HitLists::bytes(kBlockRows, s.taps) +
         kChunkHits * (s.padded_ci() + s.padded_co()) * itemsize;
}

int64_t workspace_bytes(const Shape& s, int64_t itemsize, int threads) {
  return s.taps * s.co * s.padded_ci() * itemsize + threads * worker_bytes(s, itemsize) +
         round_up(8 * s.taps, 64);
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

template <class T>
class WeightGrad {
 public:
  WeightGrad(const Shape& shape, const IsaKernels& isa, const T* grad, const T* feats,
             const int32_t* table, T* out)
      : s_(shape), isa_(isa), kernels_(isa.of(T{})), grad_(grad), feats_(feats), table_(table),
        out_(out) {}

  // False when the table has an entry outside [-1, n).
  bool run(Arena& arena, int threads) {
    const double work = static_cast<double>(s_.m) * s_.taps * s_.ci * s_.co;
    if (work < kSerialWork) threads = 1;
    int64_t* counts = arena.take<int64_t>(s_.taps);
    estimate_hits(table_, s_, counts);
    sums_ = arena.take<T>(s_.taps * s_.co * s_.padded_ci());
    const int64_t worker_size = worker_bytes(s_, sizeof(T));
    char* scratch = arena.take<char>(threads * worker_size);
    // A few units per thread even out the taps; a slice has at least a register block's rows.
    slices_ = std::clamp<int64_t>(cdiv(4 * threads, std::max<int64_t>(s_.taps, 1)), 1,
                                  std::max<int64_t>(s_.co / kMinSlice, 1));
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

  // Unit u is (tap u / slices, slice u % slices). Share i of `shares` ends where the hits before
  // it reach i / shares of all; taps without hits still need their zeros written.
  int64_t first_unit(const int64_t* counts, int64_t share, int64_t shares) const {
    const int64_t units = s_.taps * slices_;
    if (share == shares) return units;
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

  int64_t slice_start(int64_t slice) const { return s_.co * slice / slices_; }

  // False when one of the units' table entries is out of range.
  bool sum_units(int64_t first, int64_t end, Arena& arena) const {
    const int64_t first_tap = first / slices_, end_tap = (end - 1) / slices_ + 1;
    HitLists hits(arena, isa_, kBlockRows, s_.taps);
    T* left = arena.take<T>(kChunkHits * s_.padded_co());
    T* right = arena.take<T>(kChunkHits * s_.padded_ci());
    for (int64_t unit = first; unit < end; ++unit) {
      const auto [row, rows] = unit_rows(unit);
      std::fill_n(sums_ + row * s_.padded_ci(), rows * s_.padded_ci(), T(0));
    }
    for (int64_t row = 0; row < s_.m; row += kBlockRows) {
      const int64_t rows = std::min(kBlockRows, s_.m - row);
      if (!hits.collect(table_ + row * s_.taps + first_tap, s_.taps, rows, end_tap - first_tap,
                        s_.n)) {
        return false;
      }
      for (int64_t tap = first_tap; tap < end_tap; ++tap) {
        const Units units{std::max(first, tap * slices_), std::min(end, (tap + 1) * slices_)};
        add_hits(units, hits.list(tap - first_tap), hits.count(tap - first_tap),
                 grad_ + row * s_.co, left, right);
      }
    }
    for (int64_t unit = first; unit < end; ++unit) store(unit);
    return true;
  }

  struct Units {
    int64_t first, end;
  };

  // Adds the products of a tap's hits to the tap's units. Gathering rows first costs a copy, and
  // saves the indexing in every pass over them: one for each register block of sums.
  void add_hits(Units units, const Hit* hits, int64_t count, const T* grad, T* left,
                T* right) const {
    for (int64_t done = 0; done < count; done += kChunkHits) {
      const Hit* chunk = hits + done;
      const int64_t size = std::min(kChunkHits, count - done);
      kernels_.gather_rows(
          GatherRows<T>{grad, s_.co, &chunk->to, size, left, s_.padded_co()});
      kernels_.gather_rows(
          GatherRows<T>{feats_, s_.ci, &chunk->from, size, right, s_.padded_ci()});
      for (int64_t unit = units.first; unit < units.end; ++unit) {
        add_chunk(unit, left, right, size);
      }
    }
  }

  struct Rows {
    int64_t first, count;
  };

  // Rows of sums_ [taps * co, padded_ci] that belong to a unit.
  Rows unit_rows(int64_t unit) const {
    const int64_t slice = unit % slices_, start = slice_start(slice);
    return Rows{unit / slices_ * s_.co + start, slice_start(slice + 1) - start};
  }

  void add_chunk(int64_t unit, const T* left, const T* right, int64_t count) const {
    const auto [row, rows] = unit_rows(unit);
    const int64_t vectors = cdiv(s_.ci, kernels_.lanes);
    const int64_t panels = cdiv(vectors, kernels_.max_vectors);
    for (int64_t panel = 0; panel < panels; ++panel) {
      const int64_t begin = vectors * panel / panels, end = vectors * (panel + 1) / panels;
      const int64_t column = begin * kernels_.lanes;
      kernels_.outer_sum[end - begin - 1](
          OuterSum<T>{left + slice_start(unit % slices_), s_.padded_co(), rows, right + column,
                      s_.padded_ci(), sums_ + row * s_.padded_ci() + column, s_.padded_ci(),
                      count});
    }
  }

  void store(int64_t unit) const {
    const auto [row, rows] = unit_rows(unit);
    const int64_t tap = s_.reflect ? s_.taps - 1 - unit / slices_ : unit / slices_;
    const int64_t start = slice_start(unit % slices_);
    for (int64_t i = 0; i < rows; ++i) {
      std::copy_n(sums_ + (row + i) * s_.padded_ci(), s_.ci,
                  out_ + ((start + i) * s_.taps + tap) * s_.ci);
    }
  }

  const Shape s_;
  const IsaKernels& isa_;
  const GemmKernels<T>& kernels_;
  const T* grad_;
  const T* feats_;
  const int32_t* table_;
  T* out_;
  T* sums_ = nullptr;
  int64_t slices_ = 1;
};

int check(const sl_context* ctx, const DLTensor* grad, const DLTensor* feats,
          const DLTensor* table, const DLTensor* out, bool reflect, Shape* shape) {
  SL_TRY(check_float(ctx, "feats", feats, 2));
  SL_TRY(check_same_float(ctx, "grad", grad, 2, feats));
  SL_TRY(check_int32(ctx, "table", table, 2));
  SL_TRY(check_same_float(ctx, "out", out, 3, feats));
  *shape = Shape{feats->shape[0], table->shape[0], table->shape[1], feats->shape[1],
                 grad->shape[1],  reflect};
  SL_TRY(check_extent(ctx, "grad", grad, 0, shape->m));
  SL_TRY(check_extent(ctx, "out", out, 0, shape->co));
  SL_TRY(check_extent(ctx, "out", out, 1, shape->taps));
  return check_extent(ctx, "out", out, 2, shape->ci);
}

template <class T>
int weight_grad(const sl_context* ctx, const DLTensor* grad, const DLTensor* feats,
                const DLTensor* table, DLTensor* out, const Shape& shape,
                const IsaKernels& kernels) {
  const int threads = thread_count(ctx);
  SL_TRY(Arena::require(ctx, workspace_bytes(shape, sizeof(T), threads)));
  Arena arena(ctx);
  WeightGrad<T> op(shape, kernels, data<const T>(grad), data<const T>(feats),
                   data<const int32_t>(table), data<T>(out));
  return op.run(arena, threads) ? SL_OK : report_bad_entry(ctx, table, shape.n);
}

int weight_grad_on(const sl_context* ctx, const DLTensor* grad, const DLTensor* feats,
                   const DLTensor* table, DLTensor* out, bool reflect,
                   const IsaKernels& kernels) {
  return guarded(ctx, [&] {
    Shape shape;
    SL_TRY(check(ctx, grad, feats, table, out, reflect, &shape));
    return feats->dtype.bits == 32
               ? weight_grad<float>(ctx, grad, feats, table, out, shape, kernels)
               : weight_grad<double>(ctx, grad, feats, table, out, shape, kernels);
  });
}

}  // namespace
}  // namespace shiplap::sparse3d

// Workspace: (k * co + 128 * threads) * 16 * cdiv(ci, 16) * itemsize
//            + threads * (2048 * cdiv(co, 16) * itemsize + 4160 * k + 64 * cdiv(k, 16))
//            + 64 * cdiv(k, 8)
extern "C" int sparse3d_conv_weight_grad(const sl_context* ctx, const DLTensor* grad,
                                         const DLTensor* feats, const DLTensor* table,
                                         const DLTensor* order, const DLTensor*, DLTensor* out,
                                         int64_t groups, int32_t reflect) {
  using namespace shiplap::sparse3d;
  if (order != nullptr || groups != 1) {
    return fail(ctx, SL_UNSUPPORTED, "sorted tables and groups");
  }
  return weight_grad_on(ctx, grad, feats, table, out, reflect != 0, best_kernels());
}

extern "C" int sparse3d_conv_weight_grad_isa(const sl_context* ctx, const DLTensor* grad,
                                             const DLTensor* feats, const DLTensor* table,
                                             DLTensor* out, int32_t isa) {
  using namespace shiplap::sparse3d;
  const IsaKernels* kernels = isa_kernels(isa);
  if (kernels == nullptr) return fail(ctx, SL_UNSUPPORTED, "no such instruction set here");
  return weight_grad_on(ctx, grad, feats, table, out, false, *kernels);
}
