// RMS norm of float rows on the CPU: compiled by sl.source with the header of the declaration in front.
#include <cmath>

int rms_norm_cpu(const sl_context*, const DLTensor* x, const DLTensor* weight, DLTensor* out, double eps) {
  const int64_t rows = x->shape[0], columns = x->shape[1];
  const float *from = static_cast<const float*>(x->data), *factor = static_cast<const float*>(weight->data);
  float* to = static_cast<float*>(out->data);
  for (int64_t r = 0; r < rows; r++, from += columns, to += columns) {
    double sum = 0;
    for (int64_t i = 0; i < columns; i++) sum += static_cast<double>(from[i]) * from[i];
    const float scale = static_cast<float>(1 / std::sqrt(sum / columns + eps));
    for (int64_t i = 0; i < columns; i++) to[i] = from[i] * scale * factor[i];
  }
  return SL_OK;
}
