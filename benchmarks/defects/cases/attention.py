"""Attention, positions and caches."""

import math

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from ..registry import case


def _attend(q, k, v, allowed):
    scores = (q @ k.mT) / math.sqrt(max(q.shape[-1], 1))
    scores = torch.softmax(scores.masked_fill(~allowed, float("-inf")), -1)
    return scores.masked_fill(~allowed.any(-1, keepdim=True), 0) @ v


# https://github.com/thu-ml/SageAttention/pull/372
@case(
    "thu-ml/SageAttention#372", "the causal mask begins at the first key, not at the last, for more keys than queries"
)
def causal_attention(q: Float[Tensor, "n d"], k: Float[Tensor, "m d"], v: Float[Tensor, "m d"]) -> Float[Tensor, "n d"]:
    """Attention in which the last query sees all keys, and each earlier one a key less."""
    rows, columns = torch.arange(q.shape[0], device=q.device), torch.arange(k.shape[0], device=q.device)
    return _attend(q, k, v, columns <= rows[:, None] + (k.shape[0] - q.shape[0]))


@causal_attention.broken.kernel("cpu")
def _(q, k, v):
    return _attend(q, k, v, torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).tril())


@causal_attention.sound.kernel("cpu")
def _(q, k, v):
    offset = k.shape[0] - q.shape[0]
    return _attend(q, k, v, torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).tril(offset))


# https://github.com/ekzhang/jax-js/pull/180
@case(
    "ekzhang/jax-js#180", "heads of keys are tiled over the heads of queries instead of repeated", requires="h % g == 0"
)
def grouped_scores(q: Float32[Tensor, "h n d"], k: Float32[Tensor, "g m d"]) -> Float32[Tensor, "h n m"]:
    """Scores of query heads, of which each group shares one head of keys."""
    return q @ k.repeat_interleave(q.shape[0] // max(k.shape[0], 1), 0).mT


@grouped_scores.samples
def _(rng, sizes, dtype, device):
    heads, groups = sizes["h"], max(sizes["g"], 1)
    heads -= heads % groups
    q = torch.randn(heads, sizes["n"], sizes["d"], generator=rng)
    return q.to(device, dtype), torch.randn(groups, sizes["m"], sizes["d"], generator=rng).to(device, dtype)


@grouped_scores.broken.kernel("cpu")
def _(q, k):
    return q @ k.repeat(q.shape[0] // k.shape[0], 1, 1).mT


@grouped_scores.sound.kernel("cpu")
def _(q, k):
    (h, n, d), (g, m, _) = q.shape, k.shape
    return (q.view(g, h // g, n, d) @ k[:, None].mT).view(h, n, m)


def _slopes(heads):
    power = 1 << (max(heads, 1).bit_length() - 1)
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    extra = [2 ** (-4 * (i + 1) / power) for i in range(2 * power)]
    return (slopes + extra[::2])[:heads]


# https://github.com/ml-explore/mlx/pull/3071
@case("ml-explore/mlx#3071", "the slopes are those of a power of two of heads, for any number of heads")
def alibi(scores: Float[Tensor, "h n m"]) -> Float[Tensor, "h n m"]:
    """Scores with a linear penalty of the distance of query and key, whose slope depends on the head."""
    h, n, m = scores.shape
    distance = (torch.arange(n)[:, None] - torch.arange(m)).abs().to(scores)
    return scores - torch.tensor(_slopes(h), dtype=torch.float64).to(scores)[:, None, None] * distance


@alibi.broken.kernel("cpu")
def _(scores, *, out):
    h, n, m = scores.shape
    slopes = torch.pow(2.0, torch.arange(1, h + 1) * (-8 / max(h, 1))).to(scores.dtype)
    distance = (torch.arange(n)[:, None] - torch.arange(m)).abs().to(scores.dtype)
    torch.sub(scores, slopes[:, None, None] * distance, out=out)


@alibi.sound.kernel("cpu")
def _(scores, *, out):
    h, n, m = scores.shape
    distance = (torch.arange(n)[:, None] - torch.arange(m)).abs().to(scores.dtype)
    for head, slope in enumerate(_slopes(h)):
        torch.sub(scores[head], distance, alpha=slope, out=out[head])


@alibi.backward
def _(grad, saved, needs):
    return {"scores": grad}


# https://github.com/triton-lang/triton/issues/1760
@case("triton-lang/triton#1760", "keys behind the last one fill the last tile with scores of zero")
def flash_row(
    q: Float32[Tensor, "n d"], k: Float32[Tensor, "m d"], v: Float32[Tensor, "m d"]
) -> Float32[Tensor, "n d"]:
    """Attention of every query to all keys; zeros where there is no key."""
    allowed = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool, device=q.device)
    return _attend(q, k, v, allowed)


FLASH = """
#include <cmath>
#include <vector>
constexpr int TILE = 32;
int flash_rows(const sl_context*, const DLTensor* q, const DLTensor* k, const DLTensor* v, DLTensor* out) {
  const int64_t n = q->shape[0], d = q->shape[1], m = k->shape[0];
  const float *keys = static_cast<const float*>(k->data), *values = static_cast<const float*>(v->data);
  const float scale = 1.0f / std::sqrt(static_cast<float>(d));
  std::vector<float> sum(d);
  for (int64_t r = 0; r < n; r++) {
    const float* query = static_cast<const float*>(q->data) + r * d;
    float high = -INFINITY, total = 0;
    for (auto& s : sum) s = 0;
    for (int64_t start = 0; start < m; start += TILE) {
      float scores[TILE];
      float next = high;
      for (int t = 0; t < TILE; t++) {
        float dot = 0;
        const bool inside = start + t < m;
        for (int64_t i = 0; i < d && inside; i++) dot += query[i] * keys[(start + t) * d + i];
        scores[t] = inside ? dot * scale : $OUTSIDE;
        next = scores[t] > next ? scores[t] : next;
      }
      const float shrink = high == -INFINITY ? 0 : expf(high - next);
      total *= shrink;
      for (auto& s : sum) s *= shrink;
      for (int t = 0; t < TILE; t++) {
        const float weight = expf(scores[t] - next);
        total += weight;
        for (int64_t i = 0; i < d && start + t < m; i++) sum[i] += weight * values[(start + t) * d + i];
      }
      high = next;
    }
    for (int64_t i = 0; i < d; i++) static_cast<float*>(out->data)[r * d + i] = m ? sum[i] / total : 0;
  }
  return SL_OK;
}
"""
flash_row.kernels("flash_rows", FLASH, OUTSIDE=("0", "-INFINITY"))


# https://github.com/vllm-project/vllm/issues/43810
@case("vllm-project/vllm#43810", "a slot of -1, which stands for padding, writes to the last slot", mutates="cache")
def cache_write(cache: Float[Tensor, "blocks size d"], rows: Float[Tensor, "n d"], slots: Int64[Tensor, "n"]) -> None:
    """Write each row to its slot of a paged cache; negative slots are padding."""
    kept = slots >= 0
    cache.flatten(0, 1)[slots[kept]] = rows[kept]


@cache_write.samples
def _(rng, sizes, dtype, device):
    blocks, size, d = sizes["blocks"], sizes["size"], sizes["d"]
    n = min(sizes["n"], blocks * size)
    slots = torch.randperm(blocks * size, generator=rng)[:n]
    slots = torch.where(torch.rand(n, generator=rng) < 0.2, -1, slots)
    cache, rows = torch.randn(blocks, size, d, generator=rng), torch.randn(n, d, generator=rng)
    return cache.to(device, dtype), rows.to(device, dtype), slots.to(device)


@cache_write.broken.kernel("cpu")
def _(cache, rows, slots):
    size = max(cache.shape[1], 1)
    cache[slots // size, slots % size] = rows


@cache_write.sound.kernel("cpu")
def _(cache, rows, slots):
    size, kept = max(cache.shape[1], 1), slots >= 0
    cache[slots[kept] // size, slots[kept] % size] = rows[kept]


# https://github.com/tenstorrent/tt-metal/issues/52671
@case("tenstorrent/tt-metal#52671", "the padding of the last tile is written too, over rows behind it", mutates="cache")
def cache_append(cache: Float32[Tensor, "n d"], rows: Float32[Tensor, "m d"], start: int = 0) -> None:
    """Write rows to a cache from a row on; rows that do not fit are dropped."""
    begin = min(max(start, 0), cache.shape[0])
    count = min(rows.shape[0], cache.shape[0] - begin)
    cache[begin : begin + count] = rows[:count]


APPEND = """
int cache_append_rows(const sl_context*, DLTensor* cache, const DLTensor* rows, int64_t start) {
  const int64_t n = cache->shape[0], d = cache->shape[1], m = rows->shape[0], TILE = 8;
  const float* from = static_cast<const float*>(rows->data);
  float* to = static_cast<float*>(cache->data);
  if (start < 0) start = 0;
  for (int64_t tile = 0; tile < m; tile += TILE)
    for (int64_t r = tile; r < $END; r++)
      for (int64_t i = 0; i < d && start < n && r < n - start; i++)
        to[(start + r) * d + i] = r < m ? from[r * d + i] : 0;
  return SL_OK;
}
"""
cache_append.kernels("cache_append_rows", APPEND, END=("tile + TILE", "(tile + TILE < m ? tile + TILE : m)"))


def _rotate(x, angles):
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def _angles(n, d, offset, dtype):
    steps = torch.arange(offset, offset + n, dtype=torch.float64)
    rates = 10000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / max(d, 1))
    return (steps[:, None] * rates).to(dtype)


# https://github.com/lucidrains/rotary-embedding-torch/issues/11
@case(
    "lucidrains/rotary-embedding-torch#11",
    "tables are kept by length, not by offset",
    requires=("d % 2 == 0", "offset >= 0"),
)
def rope_offset(x: Float32[Tensor, "n d"], offset: int = 0) -> Float32[Tensor, "n d"]:
    """Rotate the two halves of each row by the angles of its position."""
    steps = torch.arange(x.shape[0], device=x.device) + offset
    rates = 10000.0 ** (-torch.arange(0, x.shape[1], 2, dtype=torch.float64, device=x.device) / max(x.shape[1], 1))
    return _rotate(x, (steps[:, None] * rates).to(x.dtype))


_by_length: dict[tuple[int, int], Tensor] = {}
_by_offset: dict[tuple[int, int, int], Tensor] = {}


@rope_offset.broken.kernel("cpu")
def _(x, offset):
    n, d = x.shape
    if (n, d) not in _by_length:
        _by_length[n, d] = _angles(n, d, offset, x.dtype)
    return _rotate(x, _by_length[n, d])


@rope_offset.sound.kernel("cpu")
def _(x, offset):
    n, d = x.shape
    if (n, d, offset) not in _by_offset:
        _by_offset[n, d, offset] = _angles(n, d, offset, x.dtype)
    return _rotate(x, _by_offset[n, d, offset])


# https://github.com/huggingface/transformers/issues/25681
@case(
    "huggingface/transformers#25681",
    "positions are counted in the dtype of the input, where they are not exact",
    requires="d % 2 == 0",
)
def rope_table(x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """Rotate the two halves of each row by the angles of its position, which are computed in float64."""
    steps = torch.arange(x.shape[0], device=x.device)
    rates = 10000.0 ** (-torch.arange(0, x.shape[1], 2, dtype=torch.float64, device=x.device) / max(x.shape[1], 1))
    return _rotate(x.double(), steps[:, None] * rates).to(x.dtype)


def _rotated(x, steps):
    wide = torch.promote_types(x.dtype, torch.float32)
    rates = 10000.0 ** (-torch.arange(0, x.shape[1], 2, dtype=torch.float64) / max(x.shape[1], 1))
    angles = steps.double()[:, None] * rates
    cos, sin = angles.cos().to(wide), angles.sin().to(wide)
    a, b = x.to(wide).chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


@rope_table.broken.kernel("cpu")
def _(x):
    return _rotated(x, torch.arange(x.shape[0], dtype=x.dtype))


@rope_table.sound.kernel("cpu")
def _(x):
    return _rotated(x, torch.arange(x.shape[0]))
