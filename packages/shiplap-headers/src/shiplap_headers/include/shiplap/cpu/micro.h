// Register-blocked products in float32, whatever the operands are stored as: rows of a times packed panels of b.
// A panel holds WIDTH columns of b over one block of k, column next to column, as the inner loop reads them.
namespace micro {

using vec = at::vec::Vectorized<float>;
constexpr int64_t LANES = vec::size();
constexpr int64_t WIDTH = 2 * LANES;
#if defined(CPU_CAPABILITY_AVX512)
constexpr int ROWS = 14;  // 28 of 32 registers accumulate
#else
constexpr int ROWS = 6;  // 12 of 16
#endif

// Sums are held as plain registers: arrays of a class end up in memory.
#if defined(CPU_CAPABILITY_AVX512)
using reg = __m512;
inline reg multiply_add(reg x, reg y, reg z) { return _mm512_fmadd_ps(x, y, z); }
inline reg spread(float x) { return _mm512_set1_ps(x); }
#elif defined(CPU_CAPABILITY_AVX2)
using reg = __m256;
inline reg multiply_add(reg x, reg y, reg z) { return _mm256_fmadd_ps(x, y, z); }
inline reg spread(float x) { return _mm256_set1_ps(x); }
#else
using reg = vec;
inline reg multiply_add(reg x, reg y, reg z) { return at::vec::fmadd(x, y, z); }
inline reg spread(float x) { return vec(x); }
#endif

inline vec widen(const float* p) { return vec::loadu(p); }
inline vec widen(const c10::BFloat16* p) { return at::vec::convert<float>(at::vec::Vectorized<c10::BFloat16>::loadu(p, LANES)); }
inline vec widen(const int8_t* p) {
#if defined(CPU_CAPABILITY_AVX512)
    return vec(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))));
#elif defined(CPU_CAPABILITY_AVX2)
    return vec(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))));
#else
    alignas(64) float wide[LANES];
    for (int64_t i = 0; i < LANES; ++i) wide[i] = p[i];
    return vec::loadu(wide);
#endif
}

// Scratch of one thread, on a cache line of its own.
struct Scratch {
    std::unique_ptr<float[]> memory;
    float* data;
    explicit Scratch(int64_t count) : memory(new float[count + 16]) {
        data = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) & ~uintptr_t(63));
    }
};

// LANES rows of LANES elements, turned: dst[c * ldd + r] = src[r * lds + c].
template <typename T>
inline void turn(const T* src, int64_t lds, float* dst, int64_t ldd) {
    alignas(64) float square[LANES * LANES];
    c10::ForcedUnroll<LANES>{}([&](auto r) { widen(src + r * lds).store(square + r * LANES); });
    at::vec::transpose_mxn<float, int(LANES), int(LANES)>(square, LANES, dst, ldd);
}

#if defined(CPU_CAPABILITY_AVX2)
// 16 rows of 8 bytes are turned as bytes, in four rounds of interleaving, and widened on their way out.
inline void turn_bytes(const int8_t* src, int64_t lds, float* dst) {
    __m128i a[8], b[8];
    c10::ForcedUnroll<8>{}([&](auto i) {
        a[i] = _mm_unpacklo_epi8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(src + i * lds)),
                                 _mm_loadl_epi64(reinterpret_cast<const __m128i*>(src + (i + 8) * lds)));
    });
    c10::ForcedUnroll<4>{}([&](auto i) {
        b[i] = _mm_unpacklo_epi8(a[i], a[i + 4]);
        b[i + 4] = _mm_unpackhi_epi8(a[i], a[i + 4]);
    });
    c10::ForcedUnroll<2>{}([&](auto h) {
        c10::ForcedUnroll<2>{}([&](auto i) {
            a[4 * h + i] = _mm_unpacklo_epi8(b[4 * h + i], b[4 * h + i + 2]);
            a[4 * h + i + 2] = _mm_unpackhi_epi8(b[4 * h + i], b[4 * h + i + 2]);
        });
    });
    c10::ForcedUnroll<4>{}([&](auto q) {
        const __m128i even = a[q / 2 * 4 + q % 2 * 2], odd = a[q / 2 * 4 + q % 2 * 2 + 1];
        const __m128i out[2] = {_mm_unpacklo_epi8(even, odd), _mm_unpackhi_epi8(even, odd)};
        c10::ForcedUnroll<2>{}([&](auto k) {
            float* at = dst + (2 * q + k) * WIDTH;
            _mm256_storeu_ps(at, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(out[k])));
            _mm256_storeu_ps(at + 8, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(out[k], 8))));
        });
    });
}
#endif

// Panels of n columns and k rows of b, whose element (k, n) is at k * sk + n * sn; columns past n are zero.
// From one panel to the next are `height` rows, by default k.
template <typename T>
inline void pack(const T* b, int64_t sk, int64_t sn, int64_t n, int64_t k, float* panel, int64_t height = 0) {
    for (int64_t j = 0; j < n; j += WIDTH, panel += WIDTH * (height ? height : k)) {
        const T* from = b + j * sn;
        const int64_t width = std::min(WIDTH, n - j);
        int64_t p = 0;
        if (width == WIDTH && sk == 1) {
            for (; p + LANES <= k; p += LANES) {
#if defined(CPU_CAPABILITY_AVX2)
                if constexpr (std::is_same_v<T, int8_t>) {
                    turn_bytes(from + p, sn, panel + p * WIDTH);
                    continue;
                }
#endif
                turn(from + p, sn, panel + p * WIDTH, WIDTH);
                turn(from + p + LANES * sn, sn, panel + p * WIDTH + LANES, WIDTH);
            }
        } else if (width == WIDTH && sn == 1) {
            for (; p < k; ++p) {
                widen(from + p * sk).store(panel + p * WIDTH);
                widen(from + p * sk + LANES).store(panel + p * WIDTH + LANES);
            }
        }
        for (; p < k; ++p)
            for (int64_t c = 0; c < WIDTH; ++c)
                panel[p * WIDTH + c] = c < width ? static_cast<float>(from[p * sk + c * sn]) : 0.f;
    }
}

// k adjacent elements as float32.
template <typename T>
inline void widen_row(const T* from, int64_t k, float* to) {
    int64_t p = 0;
    for (; p + LANES <= k; p += LANES) widen(from + p).store(to + p);
    for (; p < k; ++p) to[p] = static_cast<float>(from[p]);
}

// Rows of a, whose element (m, k) is at m * sm + k * sk, as float32 with k innermost.
template <typename T>
inline void gather_rows(const T* a, int64_t sm, int64_t sk, int64_t m, int64_t k, float* rows, int64_t ld) {
    if (sk == 1) {
        for (int64_t i = 0; i < m; ++i) widen_row(a + i * sm, k, rows + i * ld);
        return;
    }
    int64_t whole = 0;
    if (sm == 1) {
        whole = m / LANES * LANES;
        const int64_t even = k / LANES * LANES;
        for (int64_t i = 0; i < whole; i += LANES) {
            for (int64_t p = 0; p < even; p += LANES) turn(a + i + p * sk, sk, rows + i * ld + p, ld);
            for (int64_t r = i; r < i + LANES; ++r)
                for (int64_t p = even; p < k; ++p) rows[r * ld + p] = static_cast<float>(a[r + p * sk]);
        }
    }
    for (int64_t i = whole; i < m; ++i)
        for (int64_t p = 0; p < k; ++p) rows[i * ld + p] = static_cast<float>(a[i * sm + p * sk]);
}

// R rows of a times one panel, onto the tile, or into it if this is the first block of k.
template <int R>
inline void rank_k(const float* a, int64_t lda, const float* panel, int64_t k, float* tile, int64_t ldt, bool first) {
    reg sum[R][2];
    #pragma GCC unroll 16
    for (int i = 0; i < R; ++i) sum[i][0] = sum[i][1] = spread(0.f);
    for (int64_t p = 0; p < k; ++p, panel += WIDTH) {
        const reg near = vec::loadu(panel), far = vec::loadu(panel + LANES);
        #pragma GCC unroll 16
        for (int i = 0; i < R; ++i) {
            const reg x = spread(a[i * lda + p]);
            sum[i][0] = multiply_add(x, near, sum[i][0]);
            sum[i][1] = multiply_add(x, far, sum[i][1]);
        }
    }
    #pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
        float* at = tile + i * ldt;
        const vec near = sum[i][0], far = sum[i][1];
        (first ? near : near + vec::loadu(at)).store(at);
        (first ? far : far + vec::loadu(at + LANES)).store(at + LANES);
    }
}

template <int R>
inline void some_rows(int64_t rows, const float* a, int64_t lda, const float* panel, int64_t k, float* tile, int64_t ldt, bool first) {
    if constexpr (R > 1)
        if (rows < R) return some_rows<R - 1>(rows, a, lda, panel, k, tile, ldt, first);
    rank_k<R>(a, lda, panel, k, tile, ldt, first);
}

// A block of rows times packed panels. Rows are dealt out evenly: a tail of one row would waste most registers.
inline void product(const float* a, int64_t lda, const float* panels, int64_t m, int64_t n, int64_t k, float* tile, int64_t ldt, bool first) {
    for (int64_t j = 0; j < n; j += WIDTH, panels += WIDTH * k)
        for (int64_t i = 0, steps = (m + ROWS - 1) / ROWS; i < m; --steps) {
            const int64_t rows = (m - i + steps - 1) / steps;
            some_rows<ROWS>(rows, a + i * lda, lda, panels, k, tile + i * ldt + j, ldt, first);
            i += rows;
        }
}

inline float total(reg x) {
#if defined(CPU_CAPABILITY_AVX512)
    return _mm512_reduce_add_ps(x);
#elif defined(CPU_CAPABILITY_AVX2)
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
#else
    return at::vec::vec_reduce_all<float>([](vec& u, vec& v) { return u + v; }, x);
#endif
}

// R rows of a times C rows of 8-bit weights, along k: every weight is widened in a register, once for R rows.
template <int R, int C>
inline void dots(const float* a, int64_t lda, const int8_t* w, int64_t ldw, int64_t k, float* tile, int64_t ldt) {
    reg sum[R][C];
    #pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
        #pragma GCC unroll 16
        for (int c = 0; c < C; ++c) sum[r][c] = spread(0.f);
    int64_t p = 0;
    for (; p + LANES <= k; p += LANES) {
        reg wide[C];
        #pragma GCC unroll 16
        for (int c = 0; c < C; ++c) wide[c] = widen(w + c * ldw + p);
        #pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const reg x = vec::loadu(a + r * lda + p);
            #pragma GCC unroll 16
            for (int c = 0; c < C; ++c) sum[r][c] = multiply_add(x, wide[c], sum[r][c]);
        }
    }
    #pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
        #pragma GCC unroll 16
        for (int c = 0; c < C; ++c) {
            float dot = total(sum[r][c]);
            for (int64_t q = p; q < k; ++q) dot += a[r * lda + q] * static_cast<float>(w[c * ldw + q]);
            tile[r * ldt + c] += dot;
        }
}

template <int R>
inline void dot_rows(const float* a, int64_t lda, const int8_t* w, int64_t ldw, int64_t n, int64_t k, float* tile, int64_t ldt) {
    constexpr int C = R == 1 ? 8 : R == 4 ? 3 : 4;  // at most 12 sums in registers
    int64_t j = 0;
    for (; j + C <= n; j += C) dots<R, C>(a, lda, w + j * ldw, ldw, k, tile + j, ldt);
    for (; j < n; ++j) dots<R, 1>(a, lda, w + j * ldw, ldw, k, tile + j, ldt);
}

// tile = tile * scale + shift, column by column; `count` is a multiple of LANES.
inline void affine(float* tile, int64_t ldt, int64_t m, int64_t count, const float* scale, const float* shift) {
    for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < count; j += LANES) {
            vec value = vec::loadu(tile + i * ldt + j);
            if (scale) value = value * vec::loadu(scale + j);
            if (shift) value = value + vec::loadu(shift + j);
            value.store(tile + i * ldt + j);
        }
}

}  // namespace micro
