"""Pairs of features that no declaration has, or no call, and the reason of each."""

from __future__ import annotations

from shiplap_testing.crossed.declared import TEMPLATE_OUTS, TEMPLATE_TERMS, TERMS, TRITON_OUTS, TRITON_TERMS

# A declaration has one value of each of these, and a call happens in one way.
ONE_KIND = ("rank", "dtype", "state", "kernel", "binding", "rule", "size", "way")

_OTHERS = ("none", "python", "python_out", "python_flat", "template", "triton")
_WITHOUT = {
    "count": "an op returns something or nothing",
    "gradient of a write": "a gradient through an op that writes to its arguments is refused at the call (SL304)",
    "binding": "a native binding calls a function with the C ABI, which this kernel is not",
    "template": "a template has one fresh output of fixed size (SL114)",
    "template term": "a template is not written for a list of tensors (SL114)",
    "launch": "a launch fills tensors whose sizes are known, and takes no list of tensors (SL619)",
    "launch term": "a launch takes tensors and numbers of one type, no texts, dtypes and lists of floats (SL618)",
    "view": "the reference is the op where a result is a view, so it has no kernel (SL131)",
    "workspace": "a workspace belongs to a kernel with op.kernel, and none is declared",
}


def _both(firsts: tuple[str, ...], seconds: tuple[str, ...], why: str) -> dict[frozenset[str], str]:
    """Return a dict that maps each pair of one of ``firsts`` and one of ``seconds``, as a frozenset, to ``why``. The
    arguments ``firsts`` and ``seconds`` are features such as ``out:rows``. ``why`` is the reason why no declaration has
    both.
    """
    return {frozenset((a, b)): why for a in firsts for b in seconds}


def _of(kind: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the features of the kind ``kind`` with the values ``names``, such as ``out:rows``."""
    return tuple(f"{kind}:{name}" for name in names)


_ALL_OUTS = ("same", "rows", "turned", "twice", "count", "mask", "total", "kept", "list", "size", "perhaps")
_ALL_TERMS = tuple(t for t in TERMS if t != "optional")
_WRITES = _of("state", ("mutated", "mutated_list", "mutated_optional", "returned"))

IMPOSSIBLE: dict[frozenset[str], str] = {
    **_both(("out:nothing",), (*_of("out", _ALL_OUTS), "has:several outputs"), _WITHOUT["count"]),
    **_both(("out:nothing",), ("state:pure",), "an op that neither writes nor returns does nothing"),
    **_both(("has:gradient",), ("out:nothing",), "without a result there is nothing to differentiate"),
    **_both(("has:gradient",), _WRITES, _WITHOUT["gradient of a write"]),
    **_both(("has:no defaults",), ("has:omitted",), "an argument without a default is passed"),
    **_both(("has:tuple_of_one",), ("has:several outputs", "out:kept"), "a tuple of one has one result"),
    **_both(("has:variadic",), ("term:broadcast",), "a broadcast dim does not go with variadic ones (SL101)"),
    **_both(("rank:1",), ("size:one_column",), "a vector has no column beside its rows: its one_row is the same"),
    **_both(("term:absent",), ("term:optional",), "the optional tensor is passed or absent"),
    **_both(("has:workspace",), ("kernel:none", "kernel:template"), _WITHOUT["workspace"]),
    **_both(("binding:native", "binding:packaged"), _of("kernel", _OTHERS), _WITHOUT["binding"]),
    **_both(("way:packaged",), ("binding:python", "binding:native"), "a packaged op is called from its package"),
    **_both(("way:packaged",), _of("kernel", _OTHERS), _WITHOUT["binding"]),
    **_both(
        ("kernel:template",),
        (*_of("out", tuple(o for o in (*_ALL_OUTS, "nothing") if o not in TEMPLATE_OUTS)), "has:several outputs"),
        _WITHOUT["template"],
    ),
    **_both(("kernel:template",), (*_WRITES, "state:view"), _WITHOUT["template"]),
    **_both(
        ("kernel:template",),
        _of("term", tuple(t for t in _ALL_TERMS if t not in TEMPLATE_TERMS)),
        _WITHOUT["template term"],
    ),
    **_both(("kernel:triton",), _of("out", tuple(o for o in _ALL_OUTS if o not in TRITON_OUTS)), _WITHOUT["launch"]),
    **_both(("kernel:triton",), ("state:mutated_list",), _WITHOUT["launch"]),
    **_both(("kernel:triton",), ("state:view",), _WITHOUT["view"]),
    **_both(
        ("kernel:triton",), _of("term", tuple(t for t in _ALL_TERMS if t not in TRITON_TERMS)), _WITHOUT["launch term"]
    ),
}


def is_one_kind(first: str, second: str) -> bool:
    """Return whether the features ``first`` and ``second``, strings such as ``dtype:float16``, are values of one kind
    of which a declaration has only one. No declaration has both then.
    """
    kind = first.partition(":")[0]
    return kind in ONE_KIND and kind == second.partition(":")[0]


def why_impossible(first: str, second: str) -> str:
    """Return the reason why no declaration has both features ``first`` and ``second``, strings such as
    ``dtype:float16``. Return an empty string if a declaration can have both.
    """
    if is_one_kind(first, second):
        return f"there is one {first.partition(':')[0]} at a time"
    return IMPOSSIBLE.get(frozenset((first, second)), "")
