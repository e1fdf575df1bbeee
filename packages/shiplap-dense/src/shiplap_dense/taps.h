// Rows of the product that a convolution is: the pixels under each output pixel, in the order (kh, kw, ci).
namespace micro {

struct Taps {
    int64_t h, w, ci, kh, kw, ho, wo, stride_batch, stride_h, stride_w;
    int64_t step_h, step_w, pad_h, pad_w, spread_h, spread_w;

    // Columns k0 to k0 + k of output pixels m0 to m1, as float32; what lies outside the image is zero.
    template <typename T>
    void gather(const T* image, int64_t m0, int64_t m1, int64_t k0, int64_t k, float* rows, int64_t ld) const {
        int64_t x = m0 % wo, y = m0 / wo % ho, entry = m0 / (wo * ho);
        const int64_t tap0 = k0 / ci, channel0 = k0 % ci;
        for (int64_t m = m0; m < m1; ++m, rows += ld) {
            int64_t dy = tap0 / kw, dx = tap0 % kw, channel = channel0;
            for (int64_t p = 0; p < k;) {
                const int64_t run = std::min(ci - channel, k - p);
                const int64_t row = y * step_h - pad_h + dy * spread_h, column = x * step_w - pad_w + dx * spread_w;
                if (row < 0 || row >= h || column < 0 || column >= w)
                    std::fill(rows + p, rows + p + run, 0.f);
                else
                    widen_row(image + entry * stride_batch + row * stride_h + column * stride_w + channel, run, rows + p);
                p += run;
                channel = 0;
                if (++dx == kw) dx = 0, ++dy;
            }
            if (++x == wo) {
                x = 0;
                if (++y == ho) y = 0, ++entry;
            }
        }
    }

    // Panels of filters n0 to n0 + n, rows k0 to k0 + k: all at once where a filter lies in one piece, else tap by tap.
    template <typename T>
    void pack(const T* filters, int64_t of_filter, int64_t of_row, int64_t of_tap, int64_t n, int64_t k0, int64_t k, float* panels) const {
        if (of_tap == ci && of_row == kw * ci) return micro::pack(filters + k0, 1, of_filter, n, k, panels);
        for (int64_t p = 0; p < k;) {
            const int64_t tap = (k0 + p) / ci, channel = (k0 + p) % ci, run = std::min(ci - channel, k - p);
            const T* from = filters + tap / kw * of_row + tap % kw * of_tap + channel;
            micro::pack(from, 1, of_filter, n, run, panels + p * WIDTH, k);
            p += run;
        }
    }
};

}  // namespace micro
