"""The class ``Wrapper``: the values that a template needs of one overload, and the kinds of its arguments."""

from __future__ import annotations

from dataclasses import dataclass, field

from shiplap.torch_private.aten_operators import AtenArgument, AtenDeclaration
from shiplap_backend.entries import MetadataEntry, OutputRule
from shiplap_backend.families import WrapperFamily

# Kind of the value of an argument, by its type in the schema; ``Tensor`` arguments can also be graph inputs.
_KINDS = {
    "Tensor": "tensor",
    "Tensor?": "tensor",
    "Tensor[]": "tensors",
    "Tensor?[]": "tensors",
    "Scalar": "scalar",
    "Scalar?": "scalar?",
    "int": "int",
    "SymInt": "int",
    "int?": "int?",
    "SymInt?": "int?",
    "float": "float",
    "float?": "float?",
    "bool": "bool",
    "bool?": "bool?",
    "str": "str",
    "str?": "str?",
    "ScalarType": "dtype",
    "ScalarType?": "dtype?",
    "Layout?": "layout?",
    "Device?": "device?",
    "MemoryFormat?": "format?",
    "Generator?": "generator?",
}

_ALWAYS = OutputRule("bypass")


@dataclass
class Wrapper:
    """The values from which a template generates the C++ wrapper of one overload.

    ``declaration`` is torch's, and ``entry`` is the metadata at the file and line ``where``. ``mask`` are the accepted
    dtypes, which the tensors ``gated`` must have. ``compute`` is the C++ of the dtype of the computation. ``guards``
    are pairs of a condition and its reason. ``keys``, ``nodes``, ``lets`` and ``prepare`` are C++ statements, and
    ``results`` are the C++ values of ``outputs``. ``uses`` has the use of each argument. ``derived`` are the variants,
    such as in-place, that get a wrapper with it.
    """

    declaration: AtenDeclaration
    entry: MetadataEntry
    family: WrapperFamily
    where: str
    mask: tuple[str, ...]
    gated: tuple[str, ...]
    compute: str = ""
    decides: str = ""  # dtype that the mask must hold as well, once shapes and promotion are known
    prepare: list[str] = field(default_factory=list)
    derived: tuple[AtenDeclaration, ...] = ()
    guards: list[tuple[str, str]] = field(default_factory=list)
    numbers: list[str] = field(default_factory=list)  # conditions: a dtype holds a number that is an input of the graph
    rounds: bool = False  # whether a number built into the graph may be one that its dtype does not hold
    keys: list[str] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    lets: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    updates: list[tuple[str, str, str, str]] = field(default_factory=list)  # name, tensor, condition, node
    uses: dict[str, str] = field(default_factory=dict)
    headers: set[str] = field(default_factory=set)

    @property
    def id(self) -> str:
        """The name of the overload as a C++ identifier."""
        return self.declaration.identifier

    @property
    def parameters(self) -> str:
        """The types and names of the overload's C++ parameters, separated by commas."""
        return ", ".join(f"{a.cpp} {a.name}" for a in self.declaration.arguments)

    @property
    def names(self) -> str:
        """The names of the overload's arguments, separated by commas."""
        return ", ".join(a.name for a in self.declaration.arguments)

    @property
    def tensors(self) -> list[str]:
        """The names of the overload's tensor arguments that are no outputs."""
        return [a.name for a in self.declaration.inputs if a.tensor]

    @property
    def sometimes(self) -> list[bool]:
        """A list that says for each output, in order, whether its rule has a condition ``when``.

        An output with such a condition is computed in some calls only.
        """
        return [bool(rule.when) for rule in (self.entry.output.get(n, _ALWAYS) for n in self.outputs)]

    @property
    def placed(self) -> str:
        """The name of the tensor argument on whose device the call runs.

        It is an empty string if the overload has no such argument.
        """
        return next((a.name for a in self.declaration.arguments if a.type == "Tensor"), "")

    @property
    def uniform(self) -> str:
        """The name of the tensor whose dtype the other operands must have.

        It is an empty string if their dtypes may differ. The CPU's kernels refuse most products and convolutions of two
        dtypes. Elementwise overloads promote their operands, and so do those whose output rule says ``promoted``.
        """
        structured = self.declaration.structured
        promotes = structured is not None and structured.iterator
        promotes = promotes or any("promoted(" in rule.dtype for rule in self.entry.output.values())
        if promotes or self.entry.template not in ("matmul", "structured", "functional"):
            return ""
        operands = [a for a in self.declaration.inputs if a.name in self.gated]
        several = len(operands) > 1 and len(self.mask) > 1 and operands[0].type == "Tensor"
        return operands[0].name if several else ""

    @property
    def stated(self) -> list[str]:
        """The expressions of the overload's metadata as strings ``name: expression``, for the comment above the
        generated C++.
        """
        graphs = self.entry.graph if isinstance(self.entry.graph, dict) else {"graph": self.entry.graph}
        return [f"{name}: {' '.join(text.split())}" for name, text in {**self.entry.let, **graphs}.items() if text]

    @property
    def empty(self) -> str:
        """The treatment of a call with an input without elements.

        The value ``"fallback"`` sends the call to the CPU, and ``"run"`` runs it as any other call. The metadata entry
        sets the value, or else its family.
        """
        return self.entry.empty or self.family.empty


def argument_kind(argument: AtenArgument) -> str:
    """Return the kind of value that ``argument`` has in an expression, such as ``tensor`` or ``ints?``.

    Return an empty string if an expression cannot contain it.
    """
    base, bracket, rest = argument.type.partition("[")
    if bracket and base in ("int", "SymInt"):
        return "ints?" if rest.endswith("?") else "ints"
    if bracket and base == "float":
        return "floats?" if rest.endswith("?") else "floats"
    if bracket and base == "bool":
        return "bools"
    return _KINDS.get(argument.type.split("(")[0] + argument.type.partition(")")[2], "")
