"""Declarations: SL1xx."""

from __future__ import annotations

from shiplap.errors.base import ShiplapError, register

__all__ = ["DeclarationError"]


class DeclarationError(ShiplapError, TypeError):
    """A declaration that no torch op can carry out (SL1xx)."""


register(
    DeclarationError,
    [
        (
            "SL101",
            "op name",
            "Torch ops live in a namespace; both parts must be identifiers.",
            'write @sl.op("namespace::name")',
        ),
        (
            "SL102",
            "unannotated argument",
            "The schema, checks and fake are derived from annotations.",
            'annotate it, for example x: Float[Tensor, "n c"] or stride: int = 1',
        ),
        (
            "SL103",
            "type that a torch schema cannot express",
            "An op's arguments cross the dispatcher as tensors, ints, floats, bools, strings and lists of them.",
            "split it: pass its fields as separate int, float, bool, str, list or tensor arguments",
        ),
        (
            "SL104",
            "output dim that nothing determines",
            "A fake tensor needs the size of every output.",
            'give dims={"m": "<expression>"} if it is computable, bounds={"m": "<expression>"} if data decide it',
        ),
        (
            "SL105",
            "dim expression",
            "Expressions are evaluated on symbolic sizes, so the language is small.",
            "use names of dims and int arguments with + - * // %, comparisons, len prod min max cdiv gcd pow2ceil",
        ),
        (
            "SL106",
            "output dtype that nothing determines",
            "A dtype class such as Float takes its dtype from an input.",
            "use a concrete class (Float32, Int64, ...) or one that an input also uses",
        ),
        (
            "SL107",
            "mutated argument",
            "mutates= lists tensor arguments by name; such an op returns fresh tensors only.",
            "name a tensor argument of the signature",
        ),
        (
            "SL108",
            "op name already taken",
            "Two different functions declare the same op.",
            "rename one of them; re-running the same definition is fine",
        ),
        (
            "SL109",
            "return annotation",
            "Outputs are allocated from it.",
            'annotate "-> Float[Tensor, \\"n co\\"]", a tuple of those, or "-> None" with mutates=',
        ),
        (
            "SL110",
            "backward",
            "The gradient's contract names arguments of the op.",
            "return a dict {argument name: gradient}; saves= lists names of arguments or outputs",
        ),
        ("SL111", "no tensor argument", "The device of the outputs is taken from an input.", "add a tensor argument"),
        (
            "SL112",
            "autocast rule",
            "A rule says which dtype the floating inputs get under torch.autocast.",
            "use 'widest', 'autocast', 'float32' or None",
        ),
        (
            "SL113",
            "declaration not finished",
            "A draft of 'shiplap init' knows names and types, not sizes or writes.",
            "work through the lines marked FILL, then write sl.op (or sl.adopt) in place of unfinished",
        ),
        (
            "SL114",
            "template cannot be used",
            "Inductor fills one output of a kernel source with fused neighbours.",
            "correct the template's declaration",
        ),
        (
            "SL115",
            "bucket rule",
            "Calls of one bucket share a tuned choice; a rule names dims and scalars of the op.",
            'call op.buckets("pow2", k="exact") with names of its free dims and scalars',
        ),
        (
            "SL116",
            "kernel config",
            "A config gives a value to each compile-time parameter of a kernel.",
            'give configs=[{"BLOCK": 64}, ...] with names that are keywords of the kernel',
        ),
        (
            "SL117",
            "dim along which calls are joined",
            "Calls are joined by concatenating what has that dim.",
            "name a dim that arguments and all outputs have as one of their sizes",
        ),
        (
            "SL118",
            "tolerance without a reason",
            "A kernel that may differ from its reference by more than rounding does so for a stated reason.",
            'give tolerance=(1e-3, "tanh stands for erf")',
        ),
    ],
)
