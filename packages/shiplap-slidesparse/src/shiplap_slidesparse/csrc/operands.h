// The operands of a product as its inner loops read them: rows of activations, and blocks of rows of a weight.
#pragma once

#include <cstring>

#include "dot.h"
#include "shiplap/cpu/kernel.h"

namespace shiplap::slidesparse {

constexpr Dtype kInt8Type{0, 8}, kInt32Type{0, 32}, kUint8Type{1, 8}, kFloatType{2, 32};
constexpr int64_t kBlock = kTileColumns;  // rows of a weight that are decoded at a time

// k' of a depth: whole groups of windows, in all a multiple of 32.
inline int64_t lifted_depth(int64_t k, int64_t pairs) { return round_up(cdiv(k, 2 * pairs) * 4 * (pairs - 1), 32); }

// Bytes of the portable packed form of `rows` rows.
inline int64_t packed_bytes(int64_t rows, int64_t depth, int64_t itemsize) {
  return rows * depth / 2 * itemsize + rows * depth / 8;
}

// Copies each window's four lanes side by side. `row` has room for whole groups, with zeros behind its `k` elements.
template <class T>
void lift_row(const T* row, int64_t k, int64_t pairs, T* out, int64_t depth) {
  T* next = out;
  for (int64_t group = 0; group < k; group += 2 * pairs) {
    for (int64_t w = 0; w < pairs - 1; ++w, next += 4) std::memcpy(next, row + group + 2 * w, 4 * sizeof(T));
  }
  std::fill(next, out + depth, T{});
}

// A weight of `rows` rows, dense or packed, whose blocks are asked for one by one.
template <class T>
struct Weight {
  const char* values;             // dense [rows, depth], packed [rows, depth / 2]
  const uint8_t* meta = nullptr;  // packed: [rows, depth / 8]
  int64_t depth = 0;
  int64_t itemsize = 1;
  bool packed = false;
  void (*widen)(const void* from, float* to, int64_t count) = nullptr;  // for T = float

  // The dense weight that begins at a row.
  Weight from_row(int64_t row) const {
    Weight part = *this;
    if (!packed) part.values += row * depth * itemsize;
    return part;
  }

  // Rows from `first` as T, `depth` apart, in `room` unless they lie so already.
  const T* block(int64_t first, int64_t count, T* room) const {
    return packed ? sparse_block(first, count, room) : dense_block(values + first * depth * itemsize, count, room);
  }

 private:
  const T* dense_block(const char* from, int64_t count, T* room) const {
    if constexpr (sizeof(T) == 1) return reinterpret_cast<const T*>(from);
    widen(from, reinterpret_cast<float*>(room), count * depth);
    return room;
  }

  const T* sparse_block(int64_t first, int64_t count, T* room) const {
    const int64_t half = depth / 2;
    for (int64_t row = 0; row < count; ++row) {
      const char* from = values + (first + row) * half * itemsize;
      const uint8_t* lanes = meta + (first + row) * (depth / 8);
      T* to = room + row * depth;
      const T* kept = kept_values(from, half, to);
      for (int64_t four = 0; four < depth / 4; ++four, kept += 2, to += 4) {
        place(kept, lanes[four / 2] >> (four % 2 * 4) & 15, to);
      }
    }
    return room;
  }

  // The kept half of a row as T. Widened, it lies in the second half of the row it will fill: a four is written no further
  // than where the next one is read.
  const T* kept_values(const char* from, int64_t half, T* row) const {
    if constexpr (sizeof(T) == 1) return reinterpret_cast<const T*>(from);
    widen(from, reinterpret_cast<float*>(row + half), half);
    return row + half;
  }

  // Two values to their lanes of four, zeros to the others. Of two in one lane, which no weight has, the second stays.
  static void place(const T* kept, int lanes, T* to) {
    const int first = lanes & 3, second = lanes >> 2;
    if constexpr (sizeof(T) == 1) {
      const uint32_t other = uint32_t{0xff} << 8 * second;
      const uint32_t low = static_cast<uint32_t>(static_cast<uint8_t>(kept[0])) << 8 * first;
      const uint32_t high = static_cast<uint32_t>(static_cast<uint8_t>(kept[1])) << 8 * second;
      const uint32_t word = (low & ~other) | high;
      std::memcpy(to, &word, 4);  // little-endian, as the metadata is
    } else {
      const T values[2] = {kept[0], kept[1]};
      std::fill(to, to + 4, T{});
      to[first] = values[0];
      to[second] = values[1];
    }
  }
};

constexpr int64_t kSerialProducts = 1 << 21;  // multiplications that one thread does faster than two start

// The product of `rows` rows with a weight, tile by tile: store(row, column, rows, columns, sums [*, kTileColumns]).
template <class T, class Sum, class Store>
void multiply(void (*dot)(const Dots<T, Sum>&), const T* left, int64_t rows, const Weight<T>& weight, int64_t columns,
              int threads, T* rooms, const Store& store) {
  const int64_t depth = weight.depth;
  if (rows * columns * depth < kSerialProducts) threads = 1;
  parallel_for(threads, cdiv(columns, kBlock), [&](int worker, int64_t task) {
    const int64_t first = task * kBlock, wide = std::min(kBlock, columns - first);
    T* room = rooms ? rooms + worker * kBlock * depth : nullptr;  // a weight that lies as it is needed has no rooms
    const T* right = weight.block(first, wide, room);
    Sum sums[kTileRows * kTileColumns];
    for (int64_t row = 0; row < rows; row += kTileRows) {
      const int64_t high = std::min(kTileRows, rows - row);
      dot({left + row * depth, depth, high, right, depth, wide, depth, sums});
      store(row, first, high, wide, sums);
    }
  });
}

constexpr int64_t kFewRows = 4;     // up to which making panels takes longer than it saves
constexpr int64_t kPanelRows = 256;  // the most that are multiplied with one panel

// Bytes of scratch of multiply_int8: decoded blocks, panels, and rows as panels take them.
inline int64_t int8_room(int64_t rows, int64_t depth, int threads) {
  const int64_t stride = round_up(depth, 32);
  return threads * kBlock * (depth + stride) + std::min(rows, kPanelRows) * (3 * stride + 8) + 5 * 64;
}

// multiply() of int8, in panels where the instruction set has them and there are enough rows.
template <class Store>
void multiply_int8(const Kernels& kernels, const int8_t* left, int64_t rows, const Weight<int8_t>& weight,
                   int64_t columns, int threads, Arena room, const Store& store) {
  const int64_t depth = weight.depth, stride = round_up(depth, 32);
  int8_t* rooms = weight.packed ? room.take<int8_t>(threads * kBlock * depth) : nullptr;
  if (kernels.panels.dot == nullptr || rows <= kFewRows || depth == 0) {
    return multiply(kernels.dot_int8, left, rows, weight, columns, threads, rooms, store);
  }
  // As many rows as stay in the second cache beside a panel.
  const int64_t most = std::min(rows, std::clamp<int64_t>((1 << 19) / stride / 16 * 16, 16, kPanelRows));
  uint8_t* panels = room.take<uint8_t>(threads * kBlock * stride);
  const PanelRows taken{stride, room.take<int8_t>(most * stride), room.take<Carried>(most * stride / 4),
                        room.take<int32_t>(most), room.take<int32_t>(most)};
  for (int64_t begin = 0; begin < rows; begin += most) {
    const int64_t count = std::min(most, rows - begin);
    for (int64_t row = 0; row < count; ++row) kernels.panels.take_row(left + (begin + row) * depth, depth, row, taken);
    const int workers = count * columns * depth < kSerialProducts ? 1 : threads;
    parallel_for(workers, cdiv(columns, kBlock), [&](int worker, int64_t task) {
      const int64_t first = task * kBlock, wide = std::min(kBlock, columns - first);
      uint8_t* panel = panels + worker * kBlock * stride;
      kernels.panels.fill(weight.block(first, wide, rooms ? rooms + worker * kBlock * depth : nullptr), wide, depth, panel);
      const void* next = weight.packed ? static_cast<const void*>(panel) : weight.values + (first + wide) * depth;
      int32_t sums[kTileRows * kTileColumns];
      for (int64_t row = 0; row < count; row += kTileRows) {
        const int64_t high = std::min(kTileRows, count - row);
        kernels.panels.dot(taken, depth, row, high, panel, row == 0 ? next : panel, sums);
        store(begin + row, first, high, wide, sums);
      }
    });
  }
}

inline int element_of(Dtype dtype) {
  if (dtype == Dtype{10, 8}) return kFloat8;
  if (dtype == Dtype{2, 16}) return kFloat16;
  if (dtype == Dtype{4, 16}) return kBfloat16;
  if (dtype == Dtype{2, 32}) return kFloat32;
  if (dtype == Dtype{2, 64}) return kFloat64;
  return -1;
}

}  // namespace shiplap::slidesparse
