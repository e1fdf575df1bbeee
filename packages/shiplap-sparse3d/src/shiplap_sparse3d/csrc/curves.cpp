// z_order_* and hilbert_*: codes of voxels along a curve and back, as serialize.py defines them.
#include "common.h"

namespace shiplap::sparse3d {
namespace {

constexpr int64_t kBlock = 8192;
constexpr int64_t kSerialRows = 30000;

// The low 21 bits of `x`, two zeros between each.
uint64_t spread(uint64_t x) {
  x = (x | x << 32) & 0x001f00000000ffffULL;
  x = (x | x << 16) & 0x001f0000ff0000ffULL;
  x = (x | x << 8) & 0x100f00f00f00f00fULL;
  x = (x | x << 4) & 0x10c30c30c30c30c3ULL;
  return (x | x << 2) & 0x1249249249249249ULL;
}

uint64_t gather(uint64_t x) {
  x &= 0x1249249249249249ULL;
  x = (x | x >> 2) & 0x10c30c30c30c30c3ULL;
  x = (x | x >> 4) & 0x100f00f00f00f00fULL;
  x = (x | x >> 8) & 0x001f0000ff0000ffULL;
  x = (x | x >> 16) & 0x001f00000000ffffULL;
  return (x | x >> 32) & 0x1fffff;
}

// One step of Skilling's algorithm: invert the low bits of x[0], or exchange them with x[axis].
void exchange(uint32_t* x, int axis, int bit) {
  const uint32_t low = (uint32_t{1} << bit) - 1;
  if (x[axis] >> bit & 1) {
    x[0] ^= low;
  } else {
    const uint32_t swap = (x[0] ^ x[axis]) & low;
    x[0] ^= swap;
    x[axis] ^= swap;
  }
}

void to_hilbert(uint32_t* x, int bits) {
  for (int bit = bits - 1; bit > 0; --bit) {
    for (int axis = 0; axis < 3; ++axis) exchange(x, axis, bit);
  }
  x[1] ^= x[0];
  x[2] ^= x[1];
  uint32_t parity = 0;
  for (int bit = bits - 1; bit > 0; --bit) {
    if (x[2] >> bit & 1) parity ^= (uint32_t{1} << bit) - 1;
  }
  for (int axis = 0; axis < 3; ++axis) x[axis] ^= parity;
}

void from_hilbert(uint32_t* x, int bits) {
  const uint32_t last = x[2] >> 1;
  x[2] ^= x[1];
  x[1] ^= x[0];
  x[0] ^= last;
  for (int bit = 1; bit < bits; ++bit) {
    for (int axis = 2; axis >= 0; --axis) exchange(x, axis, bit);
  }
}

struct Curve {
  bool hilbert;
  int bits;
  int axes[3];  // the one that counts most first
};

int read_curve(const sl_context* ctx, bool hilbert, int64_t bits, const int64_t* axes,
               int64_t length, Curve* out) {
  bool seen[3] = {false, false, false};
  bool good = length == 3 && bits >= 0 && bits <= 21;
  for (int place = 0; good && place < 3; ++place) {
    good = axes[place] >= 0 && axes[place] < 3 && !seen[axes[place]];
    if (good) seen[axes[place]] = true;
  }
  if (!good) return fail(ctx, SL_INVALID_ARGUMENT, "bits or axes out of range");
  *out = Curve{hilbert, static_cast<int>(bits), {}};
  for (int place = 0; place < 3; ++place) out->axes[place] = static_cast<int>(axes[place]);
  return SL_OK;
}

// body(row) -> bool for every row; the first row for which it is false, or -1.
template <class Body>
int64_t each_row(const sl_context* ctx, int64_t rows, const Body& body) {
  std::atomic<int64_t> bad{rows};
  const int threads = rows < kSerialRows ? 1 : thread_count(ctx);
  parallel_for(threads, cdiv(rows, kBlock), [&](int, int64_t task) {
    const int64_t end = std::min(rows, (task + 1) * kBlock);
    for (int64_t row = task * kBlock; row < end; ++row) {
      if (body(row)) continue;
      int64_t least = bad.load(std::memory_order_relaxed);
      while (row < least && !bad.compare_exchange_weak(least, row, std::memory_order_relaxed)) {
      }
      return;
    }
  });
  return bad == rows ? -1 : bad.load();
}

int encode(const sl_context* ctx, const DLTensor* coords, const DLTensor* codes, const Curve& curve,
           int64_t width) {
  SL_TRY(check_coords(ctx, "coords", coords));
  SL_TRY(check_int64(ctx, "codes", codes, 1));
  SL_TRY(check_extent(ctx, "codes", codes, 0, coords->shape[0]));
  const int64_t room = width - 3 * curve.bits;
  if (room < 0 || width > 63) return fail(ctx, SL_INVALID_ARGUMENT, "width out of range");
  const int64_t scenes = int64_t{1} << std::min<int64_t>(room, 31), edge = int64_t{1} << curve.bits;
  const int32_t* rows = data<const int32_t>(coords);
  int64_t* out = data<int64_t>(codes);
  const int64_t bad = each_row(ctx, coords->shape[0], [&](int64_t row) {
    const int32_t* c = rows + 4 * row;
    if (c[0] == -1) {
      out[row] = -1;
      return true;
    }
    uint32_t x[3];
    bool fits = c[0] >= 0 && c[0] < scenes;
    for (int place = 0; place < 3; ++place) {
      const int32_t value = c[1 + curve.axes[place]];
      fits = fits && value >= 0 && value < edge;
      x[place] = static_cast<uint32_t>(value);
    }
    if (!fits) return false;
    if (curve.hilbert) to_hilbert(x, curve.bits);
    const uint64_t low = spread(x[0]) << 2 | spread(x[1]) << 1 | spread(x[2]);
    out[row] = static_cast<int64_t>(static_cast<uint64_t>(c[0]) << (3 * curve.bits) | low);
    return true;
  });
  if (bad < 0) return SL_OK;
  const int32_t* c = rows + 4 * bad;
  return fail(ctx, SL_INVALID_ARGUMENT,
              "coords row %lld is (%d, %d, %d, %d) and does not fit a code of %lld bits, %d for "
              "each axis",
              static_cast<long long>(bad), c[0], c[1], c[2], c[3], static_cast<long long>(width),
              curve.bits);
}

int decode(const sl_context* ctx, const DLTensor* codes, const DLTensor* coords,
           const Curve& curve) {
  SL_TRY(check_int64(ctx, "codes", codes, 1));
  SL_TRY(check_coords(ctx, "coords", coords));
  SL_TRY(check_extent(ctx, "coords", coords, 0, codes->shape[0]));
  const int64_t* given = data<const int64_t>(codes);
  int32_t* rows = data<int32_t>(coords);
  const int shift = 3 * curve.bits;
  const int64_t bad = each_row(ctx, codes->shape[0], [&](int64_t row) {
    int32_t* c = rows + 4 * row;
    if (given[row] == -1) {
      std::fill_n(c, 4, -1);
      return true;
    }
    const int64_t batch = given[row] >> shift;
    if (batch < 0 || batch > INT32_MAX) return false;
    const auto code = static_cast<uint64_t>(given[row] - (batch << shift));
    uint32_t x[3];
    for (int place = 0; place < 3; ++place) {
      x[place] = static_cast<uint32_t>(gather(code >> (2 - place)));
    }
    if (curve.hilbert) from_hilbert(x, curve.bits);
    c[0] = static_cast<int32_t>(batch);
    for (int place = 0; place < 3; ++place) {
      c[1 + curve.axes[place]] = static_cast<int32_t>(x[place]);
    }
    return true;
  });
  if (bad < 0) return SL_OK;
  return fail(ctx, SL_INVALID_ARGUMENT, "codes[%lld] = %lld is no code of %d bits an axis",
              static_cast<long long>(bad), static_cast<long long>(given[bad]), curve.bits);
}

int encode_op(const sl_context* ctx, bool hilbert, const DLTensor* coords, DLTensor* codes,
              int64_t bits, const int64_t* axes, int64_t axes_len, int64_t width) {
  return guarded(ctx, [&] {
    Curve curve;
    SL_TRY(read_curve(ctx, hilbert, bits, axes, axes_len, &curve));
    return encode(ctx, coords, codes, curve, width);
  });
}

int decode_op(const sl_context* ctx, bool hilbert, const DLTensor* codes, DLTensor* coords,
              int64_t bits, const int64_t* axes, int64_t axes_len) {
  return guarded(ctx, [&] {
    Curve curve;
    SL_TRY(read_curve(ctx, hilbert, bits, axes, axes_len, &curve));
    return decode(ctx, codes, coords, curve);
  });
}

}  // namespace
}  // namespace shiplap::sparse3d

// Workspace: 0
extern "C" int sparse3d_z_order_encode(const sl_context* ctx, const DLTensor* coords,
                                       DLTensor* codes, int64_t bits, const int64_t* axes,
                                       int64_t axes_len, int64_t width) {
  return shiplap::sparse3d::encode_op(ctx, false, coords, codes, bits, axes, axes_len, width);
}

// Workspace: 0
extern "C" int sparse3d_z_order_decode(const sl_context* ctx, const DLTensor* codes,
                                       DLTensor* coords, int64_t bits, const int64_t* axes,
                                       int64_t axes_len) {
  return shiplap::sparse3d::decode_op(ctx, false, codes, coords, bits, axes, axes_len);
}

// Workspace: 0
extern "C" int sparse3d_hilbert_encode(const sl_context* ctx, const DLTensor* coords,
                                       DLTensor* codes, int64_t bits, const int64_t* axes,
                                       int64_t axes_len, int64_t width) {
  return shiplap::sparse3d::encode_op(ctx, true, coords, codes, bits, axes, axes_len, width);
}

// Workspace: 0
extern "C" int sparse3d_hilbert_decode(const sl_context* ctx, const DLTensor* codes,
                                       DLTensor* coords, int64_t bits, const int64_t* axes,
                                       int64_t axes_len) {
  return shiplap::sparse3d::decode_op(ctx, true, codes, coords, bits, axes, axes_len);
}
