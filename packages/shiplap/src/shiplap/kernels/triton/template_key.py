"""The generated functions between a bound call and the launch of a template.

They read the properties on which the text of the kernel depends, as far as the template mentions them. These are the
presence of arguments, the widths of offsets, alignments, strides of 1 and scalars. Each combination has a rendering,
and a launch of its own. Lookup tables are built on the host and kept on the device for calls of equal sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from shiplap.declare.binding import Binding
from shiplap.declare.generated_code import define_function, tuple_source
from shiplap.declare.spec import Arg, OpSpec
from shiplap.declare.values import Env, EnvValue
from shiplap.errors import error
from shiplap.kernels.triton.replay import CompiledTritonKernel
from shiplap.torch_private.dispatcher_calls import outside_modes

MOST_32BIT_OFFSET = 2**31 - 1  # elements that a 32-bit offset reaches
Key: TypeAlias = Hashable  # all that a rendering, a launch or a refusal depends on
Launch: TypeAlias = Callable[
    ..., "CompiledTritonKernel | None"
]  # of the grid, then of the output and each tensor: itself, its shape, strides


@dataclass
class KeptLaunch:
    """The record of a launch from which the launch can be repeated. Its fields keep their defaults if there was nothing
    to launch.

    ``tensors`` holds each tensor with its shape and strides. ``key`` identifies the compiled form, and ``compiled`` is
    the compiled kernel. ``sums`` holds the partial sums and the kernel that added them, or is None if the kernel makes
    no partial sums.
    """

    launch: Launch | None = None
    grid: Sequence[int] = ()
    tensors: list[tuple[Tensor, Sequence[int], Sequence[int]]] = field(default_factory=list)  # with shape and strides
    key: Key = None
    compiled: CompiledTritonKernel | None = None  # what Triton compiled
    sums: tuple[Tensor, CompiledTritonKernel | None] | None = None  # partial sums, and the kernel that added them

    @property
    def float32(self) -> bool:
        """Whether a tensor of the recorded launch is float32. Matrix products of float32 depend on a setting of torch
        that may change. Such a launch can therefore not be repeated without a check.
        """
        return any(tensor is not None and tensor.dtype is torch.float32 for tensor, _, _ in self.tensors)


class RunTemplate(Protocol):
    """A function that launches a template for a call into an output, or into ``split_k`` partial sums. It records the
    launch if it is given a ``KeptLaunch``.
    """

    def __call__(self, call: Binding, out: Tensor, split_k: int, kept: KeptLaunch | None = None) -> None:
        """Launch the template for ``call`` into ``out``, or into ``split_k`` partial sums. If ``kept`` is given, record
        the launch in it.
        """


def compile_template_key(spec: OpSpec, layouts: Iterable[str]) -> Callable[[Binding], Key]:
    """Return a function that takes a checked call and returns a hashable key. The key holds sizes, scalars, dtypes and
    which optional tensors are None. For the arguments named in ``layouts``, it also holds strides and alignment to 16
    bytes.
    """
    # A list has no hash, so that the key has a tuple in its place.
    lists = any("list" in str(a.scalar) for a in spec.scalars)
    env = "tuple([(k, tuple(v) if type(v) is list else v) for k, v in env.items()])" if lists else "tuple(env.items())"
    parts = [env, "tuple(call.dtypes.items())"]
    for i, arg in enumerate(spec.args):
        if arg.tensor is not None and arg.optional:
            parts.append(f"args[{i}] is None")
        if arg.name in layouts:
            parts.append(f"None if args[{i}] is None else (args[{i}].stride(), args[{i}].data_ptr() & 15)")
    key: Callable[[Binding], Key] = eval(f"lambda call: (lambda env, args: ({', '.join(parts)}))(call.env, call.args)")
    return key


def compile_template_run(
    spec: OpSpec,
    words: Iterable[str],
    reads: Sequence[Arg],
    axes: Mapping[str, int],
    tables: Sequence[DeviceTable],
    **scope: object,
) -> RunTemplate:
    """Return a generated function ``run(call, out, split_k, kept=None)`` that launches a kernel template for ``call``
    and returns None. ``split_k`` is a part of the launch's key. If ``kept`` is not None, the launch, its grid, tensors
    and key, and the compiled kernel are set as attributes of ``kept``.

    ``words`` are the names in the template's source code, on which the key of a launch depends. ``reads`` are the
    tensor arguments that the template reads. ``axes`` maps an argument to the axis along which it must have stride 1.
    Each of ``tables`` is called with the sizes of the call and its device, and returns a tensor that is passed after
    the arguments. ``scope`` holds ``grid``, ``config``, the dict ``launches`` by key, and ``launch_for``, which makes a
    missing launch.
    """
    scope |= {
        "cdiv": lambda a, b: -(-a // b),
        "adjacent": adjacent_along,
        "inner": innermost_axis,
        "reach": _largest_offset,
        # Read in each call, since allow_tf32 may change.
        "matmul": torch.backends.cuda.matmul,
        **{f"table{i}": t for i, t in enumerate(tables)},
    }
    lines = _template_run_lines(spec, frozenset(words), reads, axes, len(tables))
    return define_function("run", lines, f"launch {spec.name}", scope)


def _template_run_lines(
    spec: OpSpec, words: frozenset[str], reads: Sequence[Arg], axes: Mapping[str, int], tables: int
) -> list[str]:
    """Return the source lines of the function that :func:`compile_template_run` generates. It collects tensors, shapes
    and strides of the call, computes a key, and runs the launch stored for that key.

    The key holds the properties that ``words``, the template's names, mention. ``t0, s0, d0`` are the first tensor of
    ``reads``, its shape and its strides. ``axes`` maps an argument's name to the dim along which it must have stride 1.
    The device tables, ``tables`` in number, come after the arguments.
    """
    lines = [
        "def run(call, out, split_k, kept=None):",
        "    if not out.numel(): return",
        "    args, env = call.args, call.env",
    ]
    # Offsets of the output count too, which is contiguous.
    reaches = ["out.numel()"]
    for i, arg in enumerate(reads):
        lines.append(f"    t{i} = args[{spec.args.index(arg)}]")
        if arg.name in axes:
            each = f"t{i} = adjacent(t{i}, {axes[arg.name]})"
            lines.append(f"    if t{i} is not None: {each}" if arg.optional else f"    {each}")
        if arg.optional:
            lines.append(f"    if t{i} is None: s{i} = d{i} = ()")
        lines.append(f"    {'else: ' if arg.optional else ''}s{i}, d{i} = t{i}.shape, t{i}.stride()")
        reaches.append(_reach_source(arg, i))
    count = len(reads)
    for i in range(tables):
        lines += [
            f"    t{count + i} = table{i}(env, call.device)",
            f"    s{count + i}, d{count + i} = t{count + i}.shape, t{count + i}.stride()",
        ]
    tensors = range(count + tables)
    kept = ", ".join(f"(t{i}, s{i}, d{i})" for i in tensors)
    lines += [
        f"    wide = {' or '.join(f'{r} > {MOST_32BIT_OFFSET}' for r in reaches)}",
        f"    key = {tuple_source(['wide', 'split_k', *_template_facts(spec, words, reads)])}",
        "    launch = launches.get(key)",
        f"    if launch is None: launch = launch_for(key, call, {tuple_source(f't{i}' for i in tensors)}, wide)",
        "    blocks = grid(env, config, cdiv)",
        f"    made = launch(blocks, out, out.shape, out.stride(), {', '.join(f't{i}, s{i}, d{i}' for i in tensors)})",
        "    if kept is None: return",
        f"    kept.launch, kept.grid, kept.tensors, kept.key, kept.compiled = launch, blocks, [{kept}], key, made",
    ]
    return lines


def _template_facts(spec: OpSpec, words: frozenset[str], reads: Sequence[Arg]) -> list[str]:
    """Return Python expressions for the properties of a call on which the template's source code depends, such as
    sizes. Only properties that ``words``, the names in the template, mention are included. Offset widths and the
    split-K factor are added elsewhere.
    """
    expressions = ["matmul.allow_tf32"] if "ALLOW_TF32" in words else []
    for i, arg in enumerate(spec.args):
        if arg.optional and arg.tensor is not None and words & {arg.name, f"HAS_{arg.name.upper()}"}:
            expressions.append(f"args[{i}] is None")
    for i, arg in enumerate(reads):
        assert arg.tensor is not None
        expressions += [f"len(s{i})"] if arg.tensor.variadic else []
        expressions += [f"inner(d{i})"] if f"{arg.name.upper()}_INNER" in words else []
    for arg in spec.scalars:
        name = arg.name.upper()
        if "list" in str(arg.scalar):
            expressions += [f"tuple(env[{arg.name!r}])"] if any(w.startswith(f"{name}_") for w in words) else []
        elif name in words:
            expressions.append(f"env[{arg.name!r}]")
    dims = {d.text for a in spec.tensors if a.tensor for d in a.tensor.dims if d.kind == "name"}
    sizes = [*sorted(dims | {name for name, _ in spec.dims}), *(a.name for a in spec.scalars if a.scalar == "int")]
    # A size that the text does not mention would only make more renderings.
    aligned = [n for n in sizes if f"{n.upper()}_ALIGN" in words]
    return expressions + [f"(env.get({n!r}, 0) | 256) & -(env.get({n!r}, 0) | 256)" for n in aligned]


def _reach_source(arg: Arg, i: int) -> str:
    """Return a Python expression for the largest offset, in elements, within the tensor ``arg``. Its shape and strides
    are the variables ``s<i>`` and ``d<i>`` of the generated code. For a tensor that is None, the expression yields 0.
    """
    assert arg.tensor is not None
    if arg.tensor.variadic:
        return f"reach(s{i}, d{i})"
    terms = " + ".join(f"(s{i}[{axis}] - 1) * d{i}[{axis}]" for axis in range(len(arg.tensor.dims))) or "0"
    return f"(0 if t{i} is None else {terms})" if arg.optional else terms


def _largest_offset(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Return the offset, in elements, of the last element of a tensor with these sizes and strides."""
    return sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))


def innermost_axis(strides: Sequence[int]) -> int:
    """Return the last axis whose stride is 1, or -1 if there is none."""
    return next((axis for axis in range(len(strides) - 1, -1, -1) if strides[axis] == 1), -1)


def adjacent_along(tensor: Tensor, axis: int) -> Tensor:
    """Return ``tensor`` if it has stride 1 along ``axis``. Otherwise return a copy with that stride."""
    if tensor.stride(axis) == 1:
        return tensor
    return tensor.movedim(axis, -1).contiguous().movedim(-1, axis)


LIMIT = 256  # tables kept: a model has a few sizes


class DeviceTable:
    """A cache of lookup tables, which are tensors on a device. ``build`` makes a table from the sizes and scalars of a
    call.

    The key of a table consists of the sizes and scalars that ``build`` reads. For example, all batch sizes then use one
    table of filter taps.
    """

    def __init__(self, where: str, build: Callable[..., Tensor]) -> None:
        """Set ``build``, which makes a table from sizes, and ``where``, its place in errors. No table is made yet."""
        self.where, self.build = where, build
        self.looked_at: tuple[str, ...] = ()
        self.tables: dict[Hashable, Tensor] = {}
        self.captured: dict[int, Tensor] = {}  # CUDA graphs hold their addresses: never freed

    def __call__(self, env: Env, device: torch.device) -> Tensor:
        """Return the table for these sizes on ``device``, made at the first call. Raise ``SL305`` if it is missing
        while a CUDA graph is captured.
        """
        key = self._key(env, device)
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        table = self.tables.get(key)
        if table is None:
            if capturing:
                raise error(
                    "SL305",
                    where=self.where,
                    got="sizes that it has not been called with",
                    expected="one call before the capture",
                    what="a table of the kernel is not on the device yet",
                    fix="call the op once with tensors of these sizes, then capture",
                )
            table = self._build_table(env, device)
        if capturing:
            # Each replay of the graph reads the memory of the table, also after newer tables have replaced it.
            self.captured.setdefault(id(table), table)
        return table

    def _build_table(self, env: Env, device: torch.device) -> Tensor:
        """Build the table of the sizes ``env``, store it and return it. Drop all earlier tables if ``build`` has read a
        size that it did not read before, or if 256 tables are stored.
        """
        seen = _TrackedSizes(env)
        # Kept beyond this call, so it must be no inference tensor and no fake.
        with outside_modes():
            table = self.build(seen).to(device)
        looked_at = tuple(sorted({*self.looked_at, *seen.names}))
        if looked_at != self.looked_at or len(self.tables) >= LIMIT:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # a kernel on another stream may still read what is dropped now
            self.looked_at, self.tables = looked_at, {}
        self.tables[self._key(env, device)] = table
        return table

    def _key(self, env: Env, device: torch.device) -> Hashable:
        """Return the key of the table for ``env`` on ``device``. It consists of the device, the default dtype, and the
        sizes and scalars that ``build`` reads. A table made without a dtype depends on the default dtype.
        """
        return (device, torch.get_default_dtype(), *[_plain_table_key(env[name]) for name in self.looked_at])


class _TrackedSizes(Mapping[str, EnvValue]):
    """The sizes of a call, as a mapping that records the names that are read."""

    def __init__(self, env: Env) -> None:
        """Set the sizes by name. None has been read."""
        self.env, self.names = env, set[str]()

    def __getitem__(self, name: str) -> EnvValue:
        """Return the size or scalar ``name``, with a list as a tuple. Record in ``names`` that it was read."""
        value = self.env[name]
        self.names.add(name)
        return _plain_table_key(value)

    def __iter__(self) -> Iterator[str]:
        """Return an iterator over all names, and record that all were read."""
        # A loop over the names may depend on all of them.
        self.names.update(self.env)
        return iter(self.env)

    def __len__(self) -> int:
        """Return the number of all sizes, read or not."""
        return len(self.env)


def _plain_table_key(value: EnvValue) -> EnvValue:
    """Return a size or scalar in the form that a key can hold. A list becomes a tuple, which can be hashed."""
    return tuple(value) if isinstance(value, list) else value
