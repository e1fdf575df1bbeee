// Products of rows that a table names: the hits of a tile of output rows, tap by tap.
namespace micro {

// Where up to 64 table entries are hits, a bit each; `largest` becomes that of the entries plus 1, -1 counting as 0.
inline uint64_t hit_bits(const int32_t* entries, int64_t count, uint32_t& largest) {
    uint64_t bits = 0;
    int64_t v = 0;
#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
    __m256i most = _mm256_setzero_si256();
    for (; v + 8 <= count; v += 8) {
        const __m256i some = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(entries + v));
        bits |= uint64_t(~_mm256_movemask_ps(_mm256_castsi256_ps(some)) & 0xff) << v;
        most = _mm256_max_epu32(most, _mm256_add_epi32(some, _mm256_set1_epi32(1)));
    }
    alignas(32) uint32_t lanes[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), most);
    for (uint32_t lane : lanes) largest = std::max(largest, lane);
#endif
    for (; v < count; ++v) {
        bits |= uint64_t(entries[v] >= 0) << v;
        largest = std::max(largest, uint32_t(entries[v]) + 1);
    }
    return bits;
}

// Which rows of a tile of the table hit each tap, and what they hit: runs of up to `rows` entries, one a tap.
struct Hits {
    int64_t taps, rows;
    std::unique_ptr<int32_t[]> from, to, counts;

    Hits(int64_t taps, int64_t rows)
        : taps(taps), rows(rows + 8), from(new int32_t[taps * (rows + 8)]), to(new int32_t[taps * (rows + 8)]), counts(new int32_t[taps]) {}

    // Of table rows m0 to m1. False when an entry lies outside [-1, limit).
    bool collect(const int32_t* table, int64_t stride, int64_t m0, int64_t m1, int64_t limit) {
        std::fill(counts.get(), counts.get() + taps, 0);
        uint32_t largest = 0;
        for (int64_t m = m0; m < m1; ++m)
            for (int64_t v0 = 0; v0 < taps; v0 += 64)
                // A branch on each entry would be mispredicted once a hit, a walk over the bits about once a row.
                for (uint64_t bits = hit_bits(table + m * stride + v0, std::min(taps - v0, int64_t(64)), largest); bits; bits &= bits - 1) {
                    const int64_t v = v0 + __builtin_ctzll(bits), at = v * rows + counts[v]++;
                    from[at] = table[m * stride + v];
                    to[at] = static_cast<int32_t>(m - m0);
                }
        return int64_t(largest) <= limit;
    }
};

// R rows times some panels, onto the tiles. Not inlined: there are as many pointers as registers for them.
template <int R>
__attribute__((noinline)) void gathered_rank_k(const float* const* rows, float* const* tiles, const float* panel, int64_t k, int64_t panels) {
    const float* a[R];
    #pragma GCC unroll 16
    for (int i = 0; i < R; ++i) a[i] = rows[i];
    for (int64_t j = 0; j < panels; ++j) {
        reg sum[R][2];
        #pragma GCC unroll 16
        for (int i = 0; i < R; ++i) sum[i][0] = sum[i][1] = spread(0.f);
        for (int64_t p = 0; p < k; ++p, panel += WIDTH) {
            const reg near = vec::loadu(panel), far = vec::loadu(panel + LANES);
            #pragma GCC unroll 16
            for (int i = 0; i < R; ++i) {
                const reg x = spread(a[i][p]);
                sum[i][0] = multiply_add(x, near, sum[i][0]);
                sum[i][1] = multiply_add(x, far, sum[i][1]);
            }
        }
        #pragma GCC unroll 16
        for (int i = 0; i < R; ++i) {
            float* tile = tiles[i] + j * WIDTH;
            (vec(sum[i][0]) + vec::loadu(tile)).store(tile);
            (vec(sum[i][1]) + vec::loadu(tile + LANES)).store(tile + LANES);
        }
    }
}

template <int R>
inline void some_gathered(int64_t count, const float* const* rows, float* const* tiles, const float* panels, int64_t k, int64_t width) {
    if constexpr (R > 1)
        if (count < R) return some_gathered<R - 1>(count, rows, tiles, panels, k, width);
    gathered_rank_k<R>(rows, tiles, panels, k, width);
}

constexpr int64_t MOST = 256;  // rows of a tile
constexpr int64_t CHUNK = 48;  // hits whose rows are widened together

// The first lines of rows that arrive from anywhere; the hardware follows a longer row by itself.
inline void ask_for(const float* row, int64_t k) {
    for (int64_t p = 0; p < std::min(k, int64_t(128)); p += 16) __builtin_prefetch(row + p);
}

// tile[to[i]] += rows of a [*, k] named by `from`, times n columns of packed panels. `wide` has room for CHUNK rows.
template <typename T>
inline void gathered_product(const T* a, int64_t lda, const int32_t* from, const int32_t* to, int64_t count, const float* panels,
                             int64_t n, int64_t k, float* tile, int64_t ldt, float* wide) {
    constexpr bool as_it_lies = std::is_same_v<T, float>;
    constexpr int64_t limit = as_it_lies ? MOST : CHUNK;
    const int64_t all = (n + WIDTH - 1) / WIDTH, strip = std::max(int64_t(1), 4096 / (WIDTH * std::max(k, int64_t(1))));
    const float* rows[limit];
    float* tiles[limit];
    for (int64_t first = 0; first < count; first += limit) {
        const int64_t size = std::min(limit, count - first);
        for (int64_t i = 0; i < size; ++i) {
            const T* row = a + from[first + i] * lda;
            if constexpr (as_it_lies) {
                rows[i] = row;
            } else {
                widen_row(row, k, wide + i * k);
                rows[i] = wide + i * k;
            }
        }
        for (int64_t j = 0; j < all; j += strip) {  // as many panels as stay in the first cache
            const int64_t some = std::min(strip, all - j);
            for (int64_t i = 0; i < size; ++i) tiles[i] = tile + to[first + i] * ldt + j * WIDTH;
            for (int64_t i = 0, steps = (size + ROWS - 1) / ROWS; i < size; --steps) {
                const int64_t taken = (size - i + steps - 1) / steps;
                if constexpr (as_it_lies)
                    for (int64_t next = i + taken; next < std::min(size, i + taken + ROWS); ++next) ask_for(rows[next], k);
                some_gathered<ROWS>(taken, rows + i, tiles + i, panels + j * WIDTH * k, k, some);
                i += taken;
            }
        }
    }
}

}  // namespace micro
