"""The rewrites that ship on ten models of transformers, bfloat16, with the attention that each takes by default.

That attention, ``attention`` in the record, is ``sdpa`` for all of them in transformers 5.17: torch's fused call, which
is what users run. ``--attention eager`` writes it out instead. Rows: ``off`` (torch.compile), ``again`` (torch.compile
once more: the control), ``on`` (with all rewrites that ship) and ``eager`` (without a compiler). Each is compiled from
empty caches in a process that has compiled before, and all are timed in random order, round by round. Times are those
of calls that are queued behind each other, between events of the device; ``waited_us`` are wall times of calls that are
waited for, and ``launch_us`` what launching one takes. Compile times are seconds of processor time, of compilers that
were started too. Results, and gradients of all parameters, are compared with the same model in float32 on two samples;
``eager`` shows what bfloat16 costs, and the script fails where a compiled model is further from float32 than ``MARGIN``
times that. Models have their published widths, four layers, and batches of at least 16,384 tokens. ``--tiny --device
cpu`` is a rehearsal.

    python benchmarks/rewrite_models_gpu.py [--json benchmarks/results/rewrite_models_gpu.json] [--only NAME]

All are compiled at once, each in a process of its own, and each is timed when it is compiled, while the others stand
still. A model that is not compiled after ``--seconds`` is left out, and gradients are compared where time is left.
Compilations are compared by the processor time that they took: without rewrites (the mean of ``off``, before ``on``,
and ``again``, after it), and with them (``on``, without the proofs, which have a number of their own). Each starts from
empty caches, after one that loaded the compiler.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import transformers as t
from _queued import launched, queued, waited
from _queued import told as medians
from _together import Alone, Turns, together
from rewrite import apart, keep, kept, of_its_own
from torch import Tensor, nn
from torch._inductor import utils as inductor_utils

import shiplap as sl
from shiplap.rewrite import Match, NearMiss, scope
from shiplap.rewrite.shipped import everything

SOURCES = (
    "benchmarks/rewrite_models_gpu.py",
    "benchmarks/_together.py",
    "benchmarks/_queued.py",
    "packages/shiplap/src/shiplap/rewrite/shipped/*.py",
    "packages/shiplap/src/shiplap/rewrite/group/*.py",
)
FOLDERS: list[tempfile.TemporaryDirectory[str]] = []
ROWS: tuple[tuple[str, Any], ...] = (("first", ()), ("off", ()), ("on", everything), ("again", ()))
FEW = 2  # samples that are compared
GAIN = 1.05  # a model that is this much faster has gained
LAYERS, SHARE = 4, 0.6  # SHARE: of the time, after which gradients are left out
MARGIN, FLOOR = 1.1, 1e-5  # of the error of eager code, and the error that rounding in float32 explains
DECODER: dict[str, Any] = {"vocab_size": 1024, "num_hidden_layers": LAYERS, "use_cache": False, "pad_token_id": 0}
ENCODER: dict[str, Any] = {"vocab_size": 1024, "num_hidden_layers": LAYERS, "pad_token_id": 0}
LLAMA = {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 8192}
QWEN = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
}
GEMMA = {
    "hidden_size": 2304,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 9216,
}
T5 = {
    "d_model": 768,
    "d_kv": 64,
    "d_ff": 2048,
    "num_heads": 12,
    "num_layers": LAYERS,
    "vocab_size": 1024,
    "feed_forward_proj": "gated-gelu",
}
WHISPER = {
    "d_model": 768,
    "encoder_layers": LAYERS,
    "encoder_attention_heads": 12,
    "encoder_ffn_dim": 3072,
    "decoder_layers": 1,
    "decoder_attention_heads": 12,
    "vocab_size": 1024,
    "pad_token_id": 0,
}
# By name: class, config, its options, and the shape of what it takes
MODELS: dict[str, tuple[str, str, dict[str, Any], tuple[int, ...]]] = {
    "Qwen3": ("Qwen3Model", "Qwen3Config", {**DECODER, **QWEN}, (16, 1024)),
    "Llama": ("LlamaModel", "LlamaConfig", {**DECODER, **LLAMA}, (8, 2048)),
    "Gemma2": ("Gemma2Model", "Gemma2Config", {**DECODER, **GEMMA}, (16, 1024)),
    "GPT2": ("GPT2Model", "GPT2Config", {"n_layer": LAYERS, "vocab_size": 1024, "use_cache": False}, (16, 1024)),
    "BERT": ("BertModel", "BertConfig", ENCODER, (32, 512)),
    "ModernBERT": ("ModernBertModel", "ModernBertConfig", ENCODER, (16, 1024)),
    "T5": ("T5EncoderModel", "T5Config", T5, (32, 512)),
    "ViT": ("ViTModel", "ViTConfig", {"num_hidden_layers": LAYERS}, (128, 3, 224, 224)),
    "Swin": ("SwinModel", "SwinConfig", {"depths": [2, 2], "num_heads": [3, 6]}, (128, 3, 224, 224)),
    "Whisper": ("WhisperModel", "WhisperConfig", WHISPER, (16, 80, 3000)),
}
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 1,
    "n_layer": 1,
    "n_embd": 64,
    "n_head": 4,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_heads": 4,
    "num_layers": 1,
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
}


class First(nn.Module):
    """The first result of a model, of what it takes first; of Whisper the encoder alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.encoder if isinstance(model, t.WhisperModel) else model

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.model(x)[0]
        return made


def built(name: str, device: str, attention: str | None, *, tiny: bool) -> tuple[First, Tensor]:
    """The model in bfloat16, and what it takes; in float32 for a rehearsal. ``attention``: None for the default."""
    kind, config, options, shape = MODELS[name]
    if tiny:
        given = options if name != "GPT2" else {**options, "n_embd": 768, "n_head": 12}
        options = {**options, **{k: v for k, v in SMALL.items() if type(given.get(k)) is int}}
        shape = (2, 16) if len(shape) == 2 else (2, *shape[1:])
    torch.manual_seed(0)
    dtype = torch.float32 if tiny else torch.bfloat16
    with torch.device(device):
        asked = {} if attention is None else {"attn_implementation": attention}
        made = getattr(t, kind)._from_config(getattr(t, config)(**options), **asked)
        x = torch.randint(3, 1000, shape) if len(shape) == 2 else torch.randn(shape).to(dtype)
    return First(made).to(device, dtype).eval(), x


def spent() -> float:
    """Seconds of processor time of this process and of those it started and that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@contextmanager
def emptied() -> Iterator[None]:
    """Caches of the compiler that are empty, on disk and in memory; code that was made stays loaded."""
    FOLDERS.append(tempfile.TemporaryDirectory())
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = FOLDERS[-1].name
    os.environ.pop("TRITON_CACHE_DIR", None)
    inductor_utils.clear_caches()
    yield


@contextmanager
def noted(seconds: list[float]) -> Iterator[None]:
    """Note what each proof costs that a graph asks for."""
    plain = scope.require_proof

    def proven(rewrite: Any) -> Any:
        before = spent()
        try:
            return plain(rewrite)
        finally:
            seconds.append(spent() - before)

    scope.require_proof = proven
    try:
        yield
    finally:
        scope.require_proof = plain


def contestant(model: nn.Module, x: Tensor, rewrites: Any) -> tuple[Callable[[], Tensor], float, float, list[Any]]:
    """A call that is compiled, what its compilation cost without proofs, what these cost, what the rewrites did."""
    run, proofs = torch.compile(of_its_own(model), dynamic=False), list[float]()
    with emptied(), sl.rewrites(*rewrites) as placed, noted(proofs):
        before = spent()
        run(x)
        cost = spent() - before
        run(x)
    torch.cuda.empty_cache()  # others need the memory
    return lambda: run(x), cost - sum(proofs), sum(proofs), placed.outcomes


def gradients(model: nn.Module, x: Tensor, cotangent: Tensor, rewrites: Any = None) -> list[Tensor]:
    """Of all parameters; eager without ``rewrites``. Parameters that a result does not depend on are left out."""
    own = of_its_own(model)
    for p in own.parameters():
        p.grad = None
    with torch.enable_grad(), sl.rewrites(*(rewrites or ())):
        run: Any = own if rewrites is None else torch.compile(own, dynamic=False)
        (run(x).float() * cotangent).sum().backward()
    return [p.grad.double().flatten() for p in own.parameters() if p.grad is not None]


def wide_of(model: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor]:
    """The model in float32, and two samples: no model mixes them."""
    few = x[:FEW]
    return copy.deepcopy(model).float(), few.float() if few.is_floating_point() else few


def compared(model: nn.Module, x: Tensor) -> dict[str, float]:
    """How far the gradients are from those in float32, as one vector: with rewrites, and eager."""
    wide, given = wide_of(model, x)
    with torch.no_grad():
        cotangent = torch.randn(wide(given).shape, device=x.device)
    exact = torch.cat(gradients(wide, given, cotangent))
    del wide
    rows = {"on": everything, "eager": None}
    return {n: apart(torch.cat(gradients(model, x[:FEW], cotangent, r)), exact) for n, r in rows.items()}


def measured(args: argparse.Namespace, turns: Turns, name: str) -> None:
    """Compile, compare, wait for the turn, time, tell."""
    started = time.monotonic()
    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1
    Alone(turns.device).searches()
    FOLDERS.append(tempfile.TemporaryDirectory())
    os.environ["SHIPLAP_CACHE_DIR"] = FOLDERS[-1].name  # no proof of another process
    torch.compile(nn.Sequential(nn.Linear(8, 8), nn.GELU()).to(args.device))(torch.ones(3, 8, device=args.device))
    model, x = built(name, args.device, args.attention, tiny=args.tiny)
    calls: dict[str, Callable[[], Tensor]] = {}
    costs, outcomes, proofs = dict[str, float](), list[Any](), 0.0
    with torch.no_grad():
        for row, rewrites in ROWS:
            calls[row], costs[row], more, seen = contestant(model, x, rewrites)
            outcomes, proofs = outcomes + seen, proofs + more
        plain = (costs["off"] + costs["again"]) / 2
        calls.pop("first", None)  # the compiler itself was loaded in it
        wide, given = wide_of(model, x)
        exact, eager = wide(given), of_its_own(model)
        del wide
        torch.cuda.empty_cache()
        calls["eager"] = lambda: eager(x)
        told: dict[str, Any] = {
            "model": name,
            "attention": model.model.config._attn_implementation,
            "input": list(x.shape),
            "matches": Counter(o.rewrite for o in outcomes if isinstance(o, Match)),
            "near misses": Counter(f"{o.rewrite}: {o.reason}" for o in outcomes if isinstance(o, NearMiss)),
            "compile_s": {n: round(s, 2) for n, s in costs.items()},
            "compile on over off": round(costs["on"] / plain, 3),
            "compile again over first off": round(costs["again"] / costs["off"], 3),
            "compile and proofs over off": round((costs["on"] + proofs) / plain, 3),
            "proofs_s": round(proofs, 2),
            "error": {n: float(f"{apart(call()[:FEW], exact):.3g}") for n, call in calls.items()},
        }
        if not args.no_gradients and time.monotonic() - started < SHARE * args.seconds:
            try:
                told["gradient error"] = {n: float(f"{e:.3g}") for n, e in compared(model, x).items()}
            except torch.OutOfMemoryError:  # others have the memory
                told["gradient error"] = {}
        told["as near as eager"] = near(told["error"]) and near(told.get("gradient error", {}))
        turns_taken(told, calls, args, turns)


def near(errors: dict[str, float]) -> bool:
    """Whether compiled code is as near to float32 as eager code is."""
    return all(e <= MARGIN * errors["eager"] + FLOOR for e in errors.values())


def told_of(models: list[dict[str, Any]]) -> str:
    """The median and the least of the ratios, the most of the compile times, and whose error is off."""
    ratios = {m["model"]: m.get("off over", m["waited off over"])["on"] for m in models}
    costs = {m["model"]: m["compile on over off"] for m in models}
    least, most = min(ratios, key=ratios.__getitem__), max(costs, key=costs.__getitem__)
    proofs = max(m["compile and proofs over off"] for m in models)
    wrong = [m["model"] for m in models if not m["as near as eager"]]
    return (
        f"{len(models)} models: median {median(ratios.values()):.3f}, least {ratios[least]:.3f} ({least}), "
        f"{sum(r >= GAIN for r in ratios.values())} at {GAIN} or more; "
        f"compile time at most {costs[most]:.3f} ({most}), with proofs {proofs:.3f}; "
        f"further from float32 than eager: {wrong or 'none'}"
    )


def turns_taken(
    told: dict[str, Any], calls: dict[str, Callable[[], Tensor]], args: argparse.Namespace, turns: Turns
) -> None:
    """Time ``calls`` when the turn comes, and tell."""
    compiled = {n: call for n, call in calls.items() if n != "eager"}
    with turns.turn(), torch.no_grad():
        if args.device == "cuda":
            eager = queued({"eager": calls["eager"]}, 5)
            times = queued(compiled, args.rounds)
            told["us"], told["off over"] = medians({n: [device for device, _ in ts] for n, ts in times.items()})
            told["us"] |= {n: round(median(d for d, _ in ts) * 1e6, 1) for n, ts in eager.items()}
            told["launch_us"] = launched(times)
        told["waited_us"], told["waited off over"] = medians(waited(calls, args.rounds // 2, args.device))
    turns.tell(told)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="record, kept up to date after each model")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", nargs="*", default=[""], help="models with one of these in their name")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--attention", help="attn_implementation of transformers (default: that of each model)")
    parser.add_argument("--tiny", action="store_true", help="small models: whether each runs, not how fast")
    parser.add_argument(
        "--seconds", type=float, default=200.0, help="for compiling; what is not ready then is left out"
    )
    parser.add_argument("--no-gradients", action="store_true", help="do not compare gradients")
    args = parser.parse_args()
    models = kept(args.json, SOURCES)
    names = [n for n in MODELS if any(o in n for o in args.only) and all(m["model"] != n for m in models)]
    for told in together(names, partial(measured, args), args.seconds, args.device):
        models.append(told)
        print(json.dumps(told), flush=True)
        keep(args.json, SOURCES, args.device, args.rounds, models, ["transformers"])
    print(told_of(models) if models else "no model was compiled in time")
    sys.exit(any(not m["as near as eager"] for m in models))


if __name__ == "__main__":
    main()
