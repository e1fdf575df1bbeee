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

constexpr int64_t kBlockRows = 256;
constexpr int64_t kCountRows = 4096;  // rows per task of the counting pass
constexpr double kSerialWork = 2e6;   // multiply-adds below which one thread is faster

struct Shape {
  int64_t n, m, taps, ci, co;

  int64_t padded_ci() const { return round_up(ci, kColumnPad); }
};

int64_t worker_bytes(const Shape& s, int64_t itemsize) {
  return HitLists::bytes(kBlockRows, s.taps) + 4 * kBlockRows +
         kBlockRows * s.padded_ci() * itemsize;
}

int64_t counts_bytes(int64_t taps) { return round_up(8 * taps, 64); }

int64_t workspace_bytes(const Shape& s, int64_t itemsize, int threads) {
  return s.taps * s.co * s.padded_ci() * itemsize +
         threads * (worker_bytes(s, itemsize) + counts_bytes(s.taps));
}

// Hits of each tap over the whole table, for sharing the work out; also the range check.
class TapCounts {
 public:
  TapCounts(Arena& arena, const Shape& shape, int threads)
      : taps_(shape.taps), stride_(counts_bytes(taps_) / 8), threads_(threads),
        counts_(arena.take<int64_t>(stride_ * threads)) {
    std::fill_n(counts_, stride_ * threads, 0);
  }

  bool count(const int32_t* table, const Shape& s) {
    std::atomic<bool> valid{true};
    parallel_for(threads_, cdiv(s.m, kCountRows), [&](int worker, int64_t task) {
      const int64_t first = task * kCountRows, end = std::min(first + kCountRows, s.m);
      int64_t* counts = counts_ + worker * stride_;
      bool good = true;
      for (const int32_t* row = table + first * taps_; row != table + end * taps_; row += taps_) {
        for (int64_t tap = 0; tap < taps_; ++tap) {
          counts[tap] += row[tap] >= 0;
          good &= row[tap] >= -1 && row[tap] < s.n;
        }
      }
      if (!good) valid.store(false, std::memory_order_relaxed);
    });
    for (int worker = 1; worker < threads_; ++worker) {
      for (int64_t tap = 0; tap < taps_; ++tap) counts_[tap] += counts_[worker * stride_ + tap];
    }
    return valid.load();
  }

  int64_t operator[](int64_t tap) const { return counts_[tap]; }

 private:
  int64_t taps_, stride_;
  int threads_;
  int64_t* counts_;
};

template <class T>
class WeightGrad {
 public:
  WeightGrad(const Shape& shape, const GemmKernels<T>& kernels, const T* grad, const T* feats,
             const int32_t* table, T* out)
      : s_(shape), kernels_(kernels), grad_(grad), feats_(feats), table_(table), out_(out) {}

  // False when the table has an entry outside [-1, n).
  bool run(Arena& arena, int threads) {
    const double work = static_cast<double>(s_.m) * s_.taps * s_.ci * s_.co;
    if (work < kSerialWork) threads = 1;
    TapCounts counts(arena, s_, threads);
    if (!counts.count(table_, s_)) return false;
    sums_ = arena.take<T>(s_.taps * s_.co * s_.padded_ci());
    const int64_t worker_size = worker_bytes(s_, sizeof(T));
    char* scratch = arena.take<char>(threads * worker_size);
    // A few units per thread even out the taps; a slice has at least a register block's rows.
    slices_ = std::clamp<int64_t>(cdiv(4 * threads, std::max<int64_t>(s_.taps, 1)), 1,
                                  std::max<int64_t>(s_.co / kMinSlice, 1));
    parallel_for(threads, threads, [&](int worker, int64_t share) {
      const int64_t first = first_unit(counts, share, threads);
      const int64_t end = first_unit(counts, share + 1, threads);
      if (first < end) sum_units(first, end, Arena(scratch + worker * worker_size, worker_size));
    });
    return true;
  }

 private:
  static constexpr int64_t kMinSlice = 12;

  // Unit u is (tap u / slices, slice u % slices). Share i of `shares` ends where the hits before
  // it reach i / shares of all; taps without hits still need their zeros written.
  int64_t first_unit(const TapCounts& counts, int64_t share, int64_t shares) const {
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

  void sum_units(int64_t first, int64_t end, Arena arena) const {
    const int64_t first_tap = first / slices_, end_tap = (end - 1) / slices_ + 1;
    HitLists hits(arena, kBlockRows, s_.taps);
    int32_t* iota = arena.take<int32_t>(kBlockRows);
    T* padded = arena.take<T>(kBlockRows * s_.padded_ci());
    for (int32_t i = 0; i < kBlockRows; ++i) iota[i] = i;
    for (int64_t unit = first; unit < end; ++unit) {
      const auto [row, rows] = unit_rows(unit);
      std::fill_n(sums_ + row * s_.padded_ci(), rows * s_.padded_ci(), T(0));
    }
    for (int64_t row = 0; row < s_.m; row += kBlockRows) {
      const int64_t rows = std::min(kBlockRows, s_.m - row);
      hits.collect(table_ + row * s_.taps + first_tap, s_.taps, rows, end_tap - first_tap, s_.n);
      for (int64_t unit = first; unit < end; ++unit) {
        const int64_t tap = unit / slices_ - first_tap;
        if (hits.count(tap) == 0) continue;
        add_block(unit, hits, tap, grad_ + row * s_.co, iota, padded);
      }
    }
    for (int64_t unit = first; unit < end; ++unit) store(unit);
  }

  struct Rows {
    int64_t first, count;
  };

  // Rows of sums_ [taps * co, padded_ci] that belong to a unit.
  Rows unit_rows(int64_t unit) const {
    const int64_t slice = unit % slices_, start = slice_start(slice);
    return Rows{unit / slices_ * s_.co + start, slice_start(slice + 1) - start};
  }

  void add_block(int64_t unit, const HitLists& hits, int64_t tap, const T* grad,
                 const int32_t* iota, T* padded) const {
    const auto [row, rows] = unit_rows(unit);
    OuterSum<T> sum{grad + slice_start(unit % slices_), s_.co, rows, feats_, s_.ci,
                    sums_ + row * s_.padded_ci(), s_.padded_ci(), hits.to(tap), hits.from(tap),
                    hits.count(tap)};
    if (s_.ci % kernels_.lanes != 0) {
      pad_rows(hits, tap, padded);
      sum.right = padded;
      sum.right_stride = s_.padded_ci();
      sum.right_row = iota;
    }
    const int64_t vectors = cdiv(s_.ci, kernels_.lanes);
    const int64_t panels = cdiv(vectors, kernels_.max_vectors);
    const T* const right = sum.right;
    T* const sums = sum.sums;
    for (int64_t panel = 0; panel < panels; ++panel) {
      const int64_t begin = vectors * panel / panels, end = vectors * (panel + 1) / panels;
      sum.right = right + begin * kernels_.lanes;
      sum.sums = sums + begin * kernels_.lanes;
      kernels_.outer_sum[end - begin - 1](sum);
    }
  }

  // Whole vectors of a row of feats would read past its end.
  void pad_rows(const HitLists& hits, int64_t tap, T* padded) const {
    const int32_t* from = hits.from(tap);
    for (int64_t hit = 0; hit < hits.count(tap); ++hit, padded += s_.padded_ci()) {
      std::copy_n(feats_ + from[hit] * s_.ci, s_.ci, padded);
      std::fill(padded + s_.ci, padded + s_.padded_ci(), T(0));
    }
  }

  void store(int64_t unit) const {
    const auto [row, rows] = unit_rows(unit);
    const int64_t tap = unit / slices_, start = slice_start(unit % slices_);
    for (int64_t i = 0; i < rows; ++i) {
      std::copy_n(sums_ + (row + i) * s_.padded_ci(), s_.ci,
                  out_ + ((start + i) * s_.taps + tap) * s_.ci);
    }
  }

  const Shape s_;
  const GemmKernels<T>& kernels_;
  const T* grad_;
  const T* feats_;
  const int32_t* table_;
  T* out_;
  T* sums_ = nullptr;
  int64_t slices_ = 1;
};

int check(const sl_context* ctx, const DLTensor* grad, const DLTensor* feats,
          const DLTensor* table, const DLTensor* out, Shape* shape) {
  SL_TRY(check_float(ctx, "feats", feats, 2));
  SL_TRY(check_same_float(ctx, "grad", grad, 2, feats));
  SL_TRY(check_int32(ctx, "table", table, 2));
  SL_TRY(check_same_float(ctx, "out", out, 3, feats));
  *shape = Shape{feats->shape[0], table->shape[0], table->shape[1], feats->shape[1],
                 grad->shape[1]};
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
  WeightGrad<T> op(shape, kernels.of(T{}), data<const T>(grad), data<const T>(feats),
                   data<const int32_t>(table), data<T>(out));
  return op.run(arena, threads) ? SL_OK : report_bad_entry(ctx, table, shape.n);
}

int weight_grad_on(const sl_context* ctx, const DLTensor* grad, const DLTensor* feats,
                   const DLTensor* table, DLTensor* out, const IsaKernels& kernels) {
  return guarded(ctx, [&] {
    Shape shape;
    SL_TRY(check(ctx, grad, feats, table, out, &shape));
    return feats->dtype.bits == 32
               ? weight_grad<float>(ctx, grad, feats, table, out, shape, kernels)
               : weight_grad<double>(ctx, grad, feats, table, out, shape, kernels);
  });
}

}  // namespace
}  // namespace shiplap::sparse3d

// Workspace: (k * co + 256 * threads) * 16 * cdiv(ci, 16) * itemsize
//            + threads * (2048 * k + 64 * cdiv(k, 16) + 64 * cdiv(k, 8) + 1024)
extern "C" int sparse3d_conv_weight_grad(const sl_context* ctx, const DLTensor* grad,
                                         const DLTensor* feats, const DLTensor* table,
                                         DLTensor* out) {
  using namespace shiplap::sparse3d;
  return weight_grad_on(ctx, grad, feats, table, out, best_kernels());
}

extern "C" int sparse3d_conv_weight_grad_isa(const sl_context* ctx, const DLTensor* grad,
                                             const DLTensor* feats, const DLTensor* table,
                                             DLTensor* out, int32_t isa) {
  using namespace shiplap::sparse3d;
  const IsaKernels* kernels = isa_kernels(isa);
  if (kernels == nullptr) return fail(ctx, SL_UNSUPPORTED, "no such instruction set here");
  return weight_grad_on(ctx, grad, feats, table, out, *kernels);
}
