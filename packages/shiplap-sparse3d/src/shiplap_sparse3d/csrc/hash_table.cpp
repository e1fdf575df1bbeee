// hash_insert*, hash_lookup*: the tables of hashing.py, whose rules are there.
#include <utility>

#include "voxels.h"

namespace shiplap::sparse3d {
namespace {

constexpr uint64_t kEmpty = ~uint64_t{0};
constexpr int64_t kLookupBlock = 4096;
constexpr int64_t kSerialLookups = 20000;

uint64_t mix(uint64_t key) {
  key = (key ^ key >> 33) * 0xff51afd7ed558ccdULL;
  key = (key ^ key >> 33) * 0xc4ceb9fe1a85ec53ULL;
  return key ^ key >> 33;
}

struct Table {
  uint64_t* keys;
  uint32_t* values;
  int64_t capacity;

  int64_t home(uint64_t key) const {
    return static_cast<int64_t>((mix(key) >> 32) * static_cast<uint64_t>(capacity) >> 32);
  }
  int64_t next(int64_t slot) const { return slot + 1 == capacity ? 0 : slot + 1; }

  // The slot of `key`, or where it would have to go: the first from its home whose key is not
  // lower. -1 when there is none.
  int64_t seek(uint64_t key) const {
    int64_t slot = home(key);
    for (int64_t probe = 0; probe < capacity; ++probe, slot = next(slot)) {
      if (keys[slot] >= key) return slot;
    }
    return -1;
  }

  // False when there is no room. `used` counts the slots that are taken.
  bool insert(uint64_t key, uint32_t value, int64_t* used) const {
    int64_t slot = capacity == 0 ? -1 : seek(key);
    if (slot >= 0 && keys[slot] == key) {
      values[slot] = std::min(values[slot], value);
      return true;
    }
    if (slot < 0 || *used == capacity) return false;
    ++*used;
    // A free slot lies ahead. Each key met on the way is either lower, or makes room and moves on.
    for (;; slot = next(slot)) {
      if (keys[slot] < key) continue;
      std::swap(keys[slot], key);
      std::swap(values[slot], value);
      if (key == kEmpty) return true;
    }
  }

  int32_t find(uint64_t key) const {
    if (key == kEmpty || capacity == 0) return -1;
    const int64_t slot = seek(key);
    return slot >= 0 && keys[slot] == key ? static_cast<int32_t>(values[slot]) : -1;
  }
};

int read_table(const sl_context* ctx, const DLTensor* keys, const DLTensor* values, Table* out) {
  SL_TRY(check_int64(ctx, "table_keys", keys, 1));
  SL_TRY(check_int32(ctx, "table_values", values, 1));
  SL_TRY(check_extent(ctx, "table_values", values, 0, keys->shape[0]));
  *out = Table{data<uint64_t>(keys), data<uint32_t>(values), keys->shape[0]};
  return SL_OK;
}

// Inserts key_of(row, &key) -> status and value_of(row) for each row.
template <class Key, class Value>
int insert_all(const sl_context* ctx, const Table& table, int64_t rows, const Key& key_of,
               const Value& value_of) {
  int64_t used = 0;
  for (int64_t slot = 0; slot < table.capacity; ++slot) {
    if (table.keys[slot] == kEmpty) {
      table.values[slot] = ~uint32_t{0};  // whatever a free slot held does not travel on
    } else {
      ++used;
    }
  }
  for (int64_t row = 0; row < rows; ++row) {
    uint64_t key = kEmpty;
    SL_TRY(key_of(row, &key));
    if (key == kEmpty || table.insert(key, value_of(row), &used)) continue;
    return fail(ctx, SL_INVALID_ARGUMENT,
                "row %lld finds no room: more distinct keys than the %lld slots of the table",
                static_cast<long long>(row), static_cast<long long>(table.capacity));
  }
  return SL_OK;
}

// out[row] = what is found under key_of(row).
template <class Key>
int find_all(const sl_context* ctx, const Table& table, const DLTensor* out, int64_t rows,
             const Key& key_of) {
  SL_TRY(check_int32(ctx, "out", out, 1));
  SL_TRY(check_extent(ctx, "out", out, 0, rows));
  int32_t* found = data<int32_t>(out);
  const int threads = rows < kSerialLookups ? 1 : thread_count(ctx);
  parallel_for(threads, cdiv(rows, kLookupBlock), [&](int, int64_t task) {
    const int64_t end = std::min(rows, (task + 1) * kLookupBlock);
    for (int64_t row = task * kLookupBlock; row < end; ++row) found[row] = table.find(key_of(row));
  });
  return SL_OK;
}

bool inside(const int32_t* c, const Grid& grid) {
  return c[0] >= 0 && c[1] >= 0 && c[1] < grid.size[0] && c[2] >= 0 && c[2] < grid.size[1] &&
         c[3] >= 0 && c[3] < grid.size[2];
}

int read_grid(const sl_context* ctx, const DLTensor* coords, const int64_t* shape, int64_t length,
              Grid* out) {
  *out = Grid{{}, "spatial_shape"};
  SL_TRY(read_int3(ctx, "spatial_shape", shape, length, 1, &out->size));
  SL_TRY(check_coords(ctx, "coords", coords));
  int32_t last = 0;
  const int32_t* c = data<const int32_t>(coords);
  for (int64_t row = 0; row < coords->shape[0]; ++row) last = std::max(last, c[4 * row]);
  return check_cells(ctx, *out, last);
}

int insert_3d(const sl_context* ctx, const DLTensor* keys, const DLTensor* values,
              const DLTensor* coords, const uint32_t* given, const int64_t* shape, int64_t length) {
  Table table;
  Grid grid;
  SL_TRY(read_table(ctx, keys, values, &table));
  SL_TRY(read_grid(ctx, coords, shape, length, &grid));
  const int32_t* rows = data<const int32_t>(coords);
  const auto key_of = [&](int64_t row, uint64_t* key) {
    const int32_t* c = rows + 4 * row;
    if (c[0] == -1) return static_cast<int>(SL_OK);
    if (!inside(c, grid)) {
      return fail(ctx, SL_INVALID_ARGUMENT,
                  "coords row %lld is (%d, %d, %d, %d), outside spatial_shape (%lld, %lld, %lld)",
                  static_cast<long long>(row), c[0], c[1], c[2], c[3],
                  static_cast<long long>(grid.size[0]), static_cast<long long>(grid.size[1]),
                  static_cast<long long>(grid.size[2]));
    }
    *key = grid.key(c[0], c[1], c[2], c[3]);
    return static_cast<int>(SL_OK);
  };
  return insert_all(ctx, table, coords->shape[0], key_of, [given](int64_t row) {
    return given == nullptr ? static_cast<uint32_t>(row) : given[row];
  });
}

}  // namespace
}  // namespace shiplap::sparse3d

// Workspace: 0
extern "C" int sparse3d_hash_insert(const sl_context* ctx, DLTensor* table_keys,
                                    DLTensor* table_values, const DLTensor* keys,
                                    const DLTensor* values) {
  using namespace shiplap::sparse3d;
  return guarded(ctx, [&] {
    Table table;
    SL_TRY(read_table(ctx, table_keys, table_values, &table));
    SL_TRY(check_int64(ctx, "keys", keys, 1));
    SL_TRY(check_int32(ctx, "values", values, 1));
    SL_TRY(check_extent(ctx, "values", values, 0, keys->shape[0]));
    const uint64_t* wanted = data<const uint64_t>(keys);
    const uint32_t* given = data<const uint32_t>(values);
    const auto key_of = [wanted](int64_t row, uint64_t* key) {
      *key = wanted[row];
      return static_cast<int>(SL_OK);
    };
    return insert_all(ctx, table, keys->shape[0], key_of, [given](int64_t i) { return given[i]; });
  });
}

// Workspace: 0
extern "C" int sparse3d_hash_lookup(const sl_context* ctx, const DLTensor* table_keys,
                                    const DLTensor* table_values, const DLTensor* keys,
                                    DLTensor* out) {
  using namespace shiplap::sparse3d;
  return guarded(ctx, [&] {
    Table table;
    SL_TRY(read_table(ctx, table_keys, table_values, &table));
    SL_TRY(check_int64(ctx, "keys", keys, 1));
    const uint64_t* wanted = data<const uint64_t>(keys);
    return find_all(ctx, table, out, keys->shape[0], [wanted](int64_t row) { return wanted[row]; });
  });
}

// Workspace: 0
extern "C" int sparse3d_hash_insert_3d(const sl_context* ctx, DLTensor* table_keys,
                                       DLTensor* table_values, const DLTensor* coords,
                                       const DLTensor* values, const int64_t* spatial_shape,
                                       int64_t spatial_shape_len) {
  using namespace shiplap::sparse3d;
  return guarded(ctx, [&] {
    SL_TRY(check_int32(ctx, "values", values, 1));
    SL_TRY(check_coords(ctx, "coords", coords));
    SL_TRY(check_extent(ctx, "values", values, 0, coords->shape[0]));
    return insert_3d(ctx, table_keys, table_values, coords, data<const uint32_t>(values),
                     spatial_shape, spatial_shape_len);
  });
}

// Workspace: 0
extern "C" int sparse3d_hash_insert_3d_index(const sl_context* ctx, DLTensor* table_keys,
                                             DLTensor* table_values, const DLTensor* coords,
                                             const int64_t* spatial_shape,
                                             int64_t spatial_shape_len) {
  using namespace shiplap::sparse3d;
  return guarded(ctx, [&] {
    return insert_3d(ctx, table_keys, table_values, coords, nullptr, spatial_shape,
                     spatial_shape_len);
  });
}

// Workspace: 0
extern "C" int sparse3d_hash_lookup_3d(const sl_context* ctx, const DLTensor* table_keys,
                                       const DLTensor* table_values, const DLTensor* coords,
                                       DLTensor* out, const int64_t* spatial_shape,
                                       int64_t spatial_shape_len) {
  using namespace shiplap::sparse3d;
  return guarded(ctx, [&] {
    Table table;
    Grid grid;
    SL_TRY(read_table(ctx, table_keys, table_values, &table));
    SL_TRY(read_grid(ctx, coords, spatial_shape, spatial_shape_len, &grid));
    const int32_t* rows = data<const int32_t>(coords);
    return find_all(ctx, table, out, coords->shape[0], [&](int64_t row) {
      const int32_t* c = rows + 4 * row;
      return inside(c, grid) ? grid.key(c[0], c[1], c[2], c[3]) : kEmpty;
    });
  });
}
