// Every routine of micro.h and taps.h against a plain loop, at sizes around the widths of the vectors.
#include <torch/csrc/inductor/cpp_prefix.h>
#include <c10/util/Unroll.h>
#include "shiplap/cpu/micro.h"
#include "taps.h"
#include <cstdio>

using micro::LANES;
static int failures = 0;

static void expect(bool right, const char* what, int64_t m, int64_t n, int64_t k) {
    if (!right && ++failures < 20) std::printf("%s is wrong at m=%ld n=%ld k=%ld\n", what, long(m), long(n), long(k));
}

static float number(int64_t i) { return float((i * 7919 + 13) % 255 - 127); }  // sums of such products are exact

template <typename T>
static std::vector<T> numbers(int64_t count, int64_t from) {
    std::vector<T> found(count + 64);
    for (int64_t i = 0; i < count; ++i) found[i] = T(number(i + from));
    return found;
}

template <typename A, typename B>
static void product(int64_t m, int64_t n, int64_t k, bool a_turned, bool b_turned) {
    const auto a = numbers<A>(m * k, 1);
    const auto b = numbers<B>(n * k, 5);
    const int64_t am = a_turned ? 1 : k, ak = a_turned ? m : 1, bk = b_turned ? 1 : n, bn = b_turned ? k : 1;
    const int64_t width = (n + micro::WIDTH - 1) / micro::WIDTH * micro::WIDTH;
    micro::Scratch panels(width * k), rows(m * k), tile(m * width);
    const int64_t half = k / 2;
    for (int block = half == 0; block < 2; ++block) {
        const int64_t k0 = block * half, part = block ? k - half : half;
        micro::gather_rows(a.data() + k0 * ak, am, ak, m, part, rows.data, part);
        micro::pack(b.data() + k0 * bk, bk, bn, n, part, panels.data);
        micro::product(rows.data, part, panels.data, m, n, part, tile.data, width, k0 == 0);
    }
    bool right = true;
    for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < n; ++j) {
            double sum = 0;
            for (int64_t p = 0; p < k; ++p) sum += double(float(a[i * am + p * ak])) * double(float(b[p * bk + j * bn]));
            right &= tile.data[i * width + j] == float(sum);
        }
    expect(right, "product", m, n, k);
}

template <int R>
static void dots(int64_t n, int64_t k) {
    const auto a = numbers<float>(R * k, 3);
    const auto w = numbers<int8_t>(n * k, 9);
    std::vector<float> tile(R * n, 1.f);
    micro::dot_rows<R>(a.data(), k, w.data(), k, n, k, tile.data(), n);
    bool right = true;
    for (int64_t i = 0; i < R; ++i)
        for (int64_t j = 0; j < n; ++j) {
            double sum = 1;
            for (int64_t p = 0; p < k; ++p) sum += double(a[i * k + p]) * w[j * k + p];
            right &= tile[i * n + j] == float(sum);
        }
    expect(right, "dot_rows", R, n, k);
}

static void taps(int64_t ci, int64_t step, int64_t pad, int64_t spread) {
    const int64_t h = 7, w = 6, kh = 3, kw = 2, batch = 2;
    const int64_t ho = (h + 2 * pad - spread * (kh - 1) - 1) / step + 1, wo = (w + 2 * pad - spread * (kw - 1) - 1) / step + 1;
    const micro::Taps taps{h, w, ci, kh, kw, ho, wo, h * w * ci, w * ci, ci, step, step, pad, pad, spread, spread};
    const auto image = numbers<float>(batch * h * w * ci, 2);
    const int64_t m = batch * ho * wo, k = kh * kw * ci, from = k / 3;
    std::vector<float> rows(m * k);
    taps.gather(image.data(), 1, m, from, k - from, rows.data(), k);
    bool right = true;
    for (int64_t i = 1; i < m; ++i)
        for (int64_t p = from; p < k; ++p) {
            const int64_t y = i / wo % ho * step - pad + p / ci / kw * spread, x = i % wo * step - pad + p / ci % kw * spread;
            const bool inside = y >= 0 && y < h && x >= 0 && x < w;
            const float want = inside ? image[((i / (ho * wo) * h + y) * w + x) * ci + p % ci] : 0.f;
            right &= rows[(i - 1) * k + p - from] == want;
        }
    expect(right, "gather", m, ci, k);
}

int main() {
    for (int64_t m : {1, 5, 6, 7, 14, 15, 33})
        for (int64_t n : {1, 15, 16, 32, 33, 70})
            for (int64_t k : {1, 7, 8, 16, 33}) {
                for (int turned = 0; turned < 4; ++turned) {
                    product<float, float>(m, n, k, turned & 1, turned & 2);
                    product<c10::BFloat16, c10::BFloat16>(m, n, k, turned & 1, turned & 2);
                }
                product<float, int8_t>(m, n, k, false, true);
                dots<1>(n, k), dots<2>(n, k), dots<4>(n, k);
            }
    for (int64_t ci : {1, 3, 8, 17})
        for (int64_t step : {1, 2})
            for (int64_t pad : {0, 2})
                for (int64_t spread : {1, 2}) taps(ci, step, pad, spread);
    std::printf("lanes %ld, failures %d\n", long(LANES), failures);
    return failures != 0;
}
