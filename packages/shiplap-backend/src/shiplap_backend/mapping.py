"""The mapping of declaration, metadata entry and vendor functions to a ``Wrapper``: C++ fragments for a template.

Every argument of the overload must have a use - graph input, attribute, guard or shape only - or the entry is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from shiplap.plugin_api import error
from shiplap.torch_private.aten_operators import AtenArgument, AtenDeclaration, has_kernel
from shiplap_backend.entries import MetadataEntry, OutputRule, metadata_error, target_dtypes, wide_dtype
from shiplap_backend.expression import (
    DTYPES,
    ExpressionCompiler,
    ExpressionError,
    TypedExpression,
    Vocabulary,
    suggest_nearest,
)
from shiplap_backend.families import FAMILIES, WrapperFamily
from shiplap_backend.metadata import Metadata
from shiplap_backend.uses import check_constants, check_dtype_guards, check_names, names_in, uses_of
from shiplap_backend.vendor import Functions, VendorFunction
from shiplap_backend.wrapper import Wrapper, argument_kind

# The seed's named modes, as sizes of the arguments that such ops have.
_SIZES = {
    "matmul": "multiplied(self, mat2)",
    "reduce": "reduced(self, dim, keepdim)",
    "concat": "concatenated(tensors, dim)",
    "transpose": "swapped(self, dim0, dim1)",
}
# The dtypes that hold fewer numbers than the one in which the CPU computes them.
_NARROW = frozenset({"f16", "bf16"})
_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
_NARROW_CODES = {DTYPES[d] for d in _NARROW}
_ITERATORS = ("unary_op", "binary_op", "comparison_op")


def map_entry(name: str, declaration: AtenDeclaration, metadata: Metadata, vocabulary: Vocabulary) -> Wrapper:
    """Return the wrapper of the overload ``name``, that is, the C++ fragments for its template.

    They come from the torch declaration ``declaration`` and from the overload's entry in ``metadata``. ``vocabulary``
    has the vendor functions that the entry may use. Raise ``SL901``, ``SL902`` or ``SL903`` with file and line if the
    entry has a mistake.
    """
    entry, where = metadata.entries[name], metadata.where[name]
    family = FAMILIES[entry.template]
    return _EntryMapping(declaration, entry, family, where, metadata, vocabulary).wrapper()


class _EntryMapping:
    """The state while one entry of the metadata is compiled to C++ fragments. It has one expression compiler for the
    vendor's graph, one for guards (conditions on the arguments) and one for shapes.
    """

    def __init__(
        self,
        declaration: AtenDeclaration,
        entry: MetadataEntry,
        family: WrapperFamily,
        where: str,
        metadata: Metadata,
        words: Vocabulary,
    ) -> None:
        """Create the compilers for the expressions of ``entry``, which is the metadata of the overload ``declaration``.

        There is one compiler for the graph, one for guards, the conditions under which a call is accepted, and one for
        shapes. ``family`` has the values that the entry leaves out. ``where`` is its file and line in ``metadata``.
        ``words`` are the names that its expressions may use.
        """
        self.d, self.entry, self.family, self.where, self.metadata = declaration, entry, family, where, metadata
        self.values = {**self._arguments(), **self._outputs()}
        nodes = {
            a.name: f"n_{a.name}"
            for a in declaration.inputs
            if argument_kind(a) in ("tensor", "tensors", "scalar", "scalar?")
        }
        self.graph = ExpressionCompiler(words, nodes, self.values)
        # Guards run before shapes are inferred: an output is only what the caller passed.
        self.plain = ExpressionCompiler(
            words, {}, {**self.values, **{a.name: TypedExpression("tensor", a.name) for a in declaration.outs}}
        )
        self.shape = ExpressionCompiler(words, {}, self.plain.values)

    def wrapper(self) -> Wrapper:
        """Return the wrapper of the metadata entry, with its expressions compiled to C++ source code.

        It has the guards (conditions under which the wrapper runs a call), the vendor's graph, the outputs and the
        graph's cache key.
        """
        check_names(self.where, self.d, self.entry, self._result_names())
        w = Wrapper(self.d, self.entry, self.family, self.where, self._mask(), self._gated_tensors())
        check_dtype_guards(self.where, self.d.name, self.entry, self._accepted(), w.gated)
        w.guards = [
            (self._compiled(self.plain, c, "bool", f"guard {c!r}").code, json.dumps(why)) for c, why in self._guards()
        ]
        w.decides = self._computation_dtype()
        w.compute = DTYPES.get(w.decides) or (self._wide(w.decides) if w.decides else "")
        self.graph.narrow = not _NARROW.isdisjoint(self._computed_dtypes(w.decides))
        w.outputs = [self._result(i, name) for i, name in enumerate(self._result_names())]
        if self.family.graph:
            w.prepare = [p for i, n in enumerate(self._result_names()) for p in self._prepare(i, n)]
        if self.family.graph:
            # In this order: results read the bindings, and key and nodes depend on what all of them have read.
            w.lets = list(self._let_statements())
            w.results = [self._compiled(self.graph, e, "node", f"graph of {o!r}").code for o, e in self._graphs()]
            w.updates = list(self._updates())
            w.keys, w.nodes = list(self._key_statements()), list(self._nodes())
            w.numbers, w.rounds = list(self._number_conditions()), self.graph.rounds
            check_constants(self.where, self.d.name, self.graph.constants, self._computed_dtypes(w.decides))
        # Late, since every compiled expression records the arguments that it reads.
        w.uses = self._uses()
        structured = self.d.structured
        w.headers = {f"ATen/ops/{self.d.base}_ops.h", *self.graph.headers, *self.plain.headers, *self.shape.headers}
        w.headers |= {structured.header} if structured else set()
        w.headers.discard("")
        return w

    def _compiled(self, compiler: ExpressionCompiler, source: str, expected: str, place: str) -> TypedExpression:
        """Return the C++ of ``source``, an expression of the metadata entry, as a value of the kind ``expected``.

        ``compiler`` is that of the graph, of guards or of shapes. Raise ``SL902`` if the expression is invalid.
        ``place`` names the expression in the error.
        """
        try:
            return compiler.compile(source, expected)
        except ExpressionError as e:
            bound = [] if compiler is self.graph else sorted(names_in(source) & {*self.entry.let} - {*self.values})
            got = f"{bound[0]!r} is a binding of 'let', which only 'graph' and 'updates' can read" if bound else str(e)
            raise error("SL902", where=f"{self.where}: {self.d.name}, {place}", got=got, expected=expected) from None

    def _arguments(self) -> dict[str, TypedExpression]:
        """Return the C++ expression and the kind of each argument of the overload.

        The keys are the names that expressions of the metadata use.
        """
        optional = {a.name for a in self.d.inputs if a.type == "Tensor?"}
        value = "backend::value" if any(a.name == "value" for a in self.d.inputs) else "value"  # one so named hides it
        # Autograd passes undefined tensors where a schema says `Tensor`, as for the weight of `batch_norm_backward`.
        given = {a.name for a in self.d.inputs if "?" not in a.type and not (a.tensor and self.d.structured is None)}
        return {
            a.name: TypedExpression(
                argument_kind(a), f"{value}({a.name})" if a.name in optional else a.name, given=a.name in given
            )
            for a in self.d.inputs
            if argument_kind(a)
        }

    def _result_names(self) -> list[str]:
        """Return the names of the overload's results.

        They are its ``out=`` arguments or the arguments that it mutates. If it has neither, its results are called
        ``result``, or ``result0``, ``result1`` and so on.
        """
        if self.d.kind == "out":
            return [a.name for a in self.d.outs]
        if self.d.kind == "inplace" or not self.d.returns:
            return [a.name for a in self.d.arguments if a.mutated]
        return ["result"] if len(self.d.returns) == 1 else [f"result{i}" for i in range(len(self.d.returns))]

    def _outputs(self) -> dict[str, TypedExpression]:
        """Return the C++ variable of each result by the result's name, as an expression of the kind ``tensor``."""
        return {n: TypedExpression("tensor", self._result(i, n)) for i, n in enumerate(self._result_names())}

    def _result(self, index: int, name: str) -> str:
        """Return the C++ of the result at ``index``, whose variable is called ``name``.

        In a generated wrapper of a structured overload, it is an output of torch's operator object. Otherwise it is the
        variable.
        """
        return f"op.maybe_get_output({index})" if self.family.file == "structured" else name

    def _mask(self) -> tuple[str, ...]:
        """Return the C++ names of the dtypes that the metadata entry accepts.

        The generated wrapper sends calls with other dtypes to the CPU.
        """
        return tuple(DTYPES[d] for d in self._accepted())

    def _accepted(self) -> list[str]:
        """Return the short names of the dtypes that the metadata entry accepts.

        Sets of dtypes are replaced by their members. Raise ``SL901`` for an unknown dtype or set.
        """
        chosen = self.entry.dtypes or self.family.dtypes
        names = [chosen] if isinstance(chosen, str) else chosen
        sets = self.metadata.dtype_sets
        members = dict.fromkeys(d for n in names for d in sets.get(n, (n,)))
        unknown = [d for d in members if d not in DTYPES]
        if unknown:
            raise metadata_error(
                self.where,
                f"{self.d.name}: dtypes {unknown[0]!r}{suggest_nearest(unknown[0], {**sets, **DTYPES})}",
                "a dtype or a set",
            )
        return list(members)

    def _gated_tensors(self) -> tuple[str, ...]:
        """Return the names of the tensors whose dtypes the generated wrapper must compare with the accepted ones.

        They are the inputs, or the outputs of an overload without tensor inputs. Inputs that the entry passes to the
        graph in another dtype than that of the computation are left out.
        """
        raw = {n for n, how in self.entry.inputs.items() if how != "compute"}
        tensors = [a.name for a in self.d.inputs if a.tensor]
        return tuple(n for n in tensors or [a.name for a in self.d.outs] if n not in raw)

    def _guards(self) -> Iterator[tuple[str, str]]:
        """Yield condition and reason of each guard of the metadata entry and of its family of wrappers.

        A guard is a condition on the arguments. A call that does not satisfy it runs on the CPU.
        """
        yield from {**self.family.guard, **self.entry.guard}.items()

    def _computation_dtype(self) -> str:
        """Return the dtype in which the vendor computes, as C++ code or as a short name such as ``f32``.

        The rule ``compute`` of the metadata entry or of its family gives it. Narrow dtypes are not widened here. Raise
        ``SL901`` for an unknown rule.
        """
        # An entry's own rule comes before that of its family.
        rule = self.entry.compute or self.family.compute
        structured = self.d.structured
        if rule == "common":
            rule = "op.common_dtype()" if structured is not None and structured.iterator else "self"
        if rule in DTYPES or rule.startswith("op."):
            return rule
        if rule == "out":
            return f"dtype_of({self._result(0, self._result_names()[0])})"
        tensors = [n for n, v in self.values.items() if v.kind in ("tensor", "tensors")]
        rule = tensors[0] if rule == "self" and rule not in tensors and tensors else rule
        if rule not in tensors:
            raise metadata_error(
                self.where,
                f"{self.d.name}, compute: {rule!r}{suggest_nearest(rule, [*tensors, *DTYPES])}",
                "common, out, a tensor or a dtype",
            )
        return f"dtype_of({self.values[rule].code})"

    def _wide(self, decides: str) -> str:
        """Return the C++ of the dtype in which a sum or product is computed. ``decides`` is the C++ of the dtype of its
        operands.

        For bfloat16 operands it is float32. If the device does not have the wider dtype, the dtype of the operands is
        used.
        """
        there = target_dtypes(self.metadata.target)
        if {"f32", "i32"} <= {*there}:
            return f"opmath({decides})"
        return f"opmath({decides}, dtypes({{{', '.join(DTYPES[d] for d in there)}}}))"

    def _computed_dtypes(self, decides: str) -> list[str]:
        """Return the short names, such as ``f32``, of all dtypes in which the overload may be computed.

        ``decides`` is the dtype of the computation, as ``_computation_dtype`` returns it. If it is a short name, the
        result has this name only. If it is C++ code, the result has the accepted dtypes, of which narrow ones are
        replaced by wider ones.
        """
        if decides in DTYPES:
            return [decides]
        there = target_dtypes(self.metadata.target)
        return list(dict.fromkeys(wide_dtype(d, there) for d in self._accepted()))

    def _prepare(self, index: int, name: str) -> Iterator[str]:
        """Yield the C++ statements that allocate or resize the output ``name``.

        ``name`` is the result at ``index``. The rule of the metadata entry for the output gives its shape. An output
        that torch has allocated for a structured overload only gets new strides. Raise ``SL901`` if the rule is missing
        or does not fit.
        """
        if self.d.kind == "inplace" or not self.d.returns:
            return
        rule = self.entry.output.get(name) or self.family.output
        if self.family.file == "structured":
            if rule is not None:
                formats = ", ".join(self._tensor(name, "format", of) for of in rule.format)
                yield f"restride({self._result(index, name)}, {formats});"
            return
        if rule is None:
            raise metadata_error(
                self.where, f"{self.d.name}: output {name!r} has no rule", f"output: {{{name}: {{mode: ...}}}}"
            )
        if rule.mode == "meta":
            expected = "another mode: no structured meta gives the shape"
            raise metadata_error(self.where, f"{self.d.name}: output mode 'meta' of {name!r}", expected)
        if rule.mode in ("broadcast", "iterator", "infer"):
            yield from self._prepare_by_aten(index, name, rule)
            return
        like = self._like(name, rule)
        dtype = self._compiled(self.shape, rule.dtype, "dtype", "dtype").code if rule.dtype else f"dtype_of({like})"
        sizes = f"{like}.sizes()"
        # ``bypass`` copies shape, strides and storage format of another tensor.
        if rule.mode != "bypass":
            expression = rule.sizes if rule.mode == "sizes" else _SIZES[rule.mode]
            sizes = self._compiled(self.shape, expression, "ints", f"sizes of {name!r}").code
        if self.d.kind == "out":
            yield f"fit({name}, {sizes}, {dtype});"
            return
        formats = "".join(f", {self._tensor(name, 'format', of)}" for of in rule.format)
        made = f"like({like}, {dtype})" if rule.mode == "bypass" else f"make_result({sizes}, {like}, {dtype}{formats})"
        if rule.order:
            made = f"ordered({sizes}, {like}, {dtype}, {{{', '.join(map(str, rule.order))}}})"
        if rule.when:
            made = f"{self._compiled(self.shape, rule.when, 'bool', 'when').code} ? {made} : at::Tensor()"
        yield f"const at::Tensor {name} = {made};"

    def _prepare_by_aten(self, index: int, name: str, rule: OutputRule) -> Iterator[str]:
        """Yield the C++ statements for the output ``name``, whose shape torch computes itself.

        ``name`` is the result at ``index``. Depending on ``rule``, torch does so by its ``TensorIterator`` or by the
        operator's kernel for the Meta device. Raise ``SL901`` if the overload has no such kernel.
        """
        if rule.mode == "infer":
            # What torch registers for `..._overrideable` on every device only says that nobody overrode it.
            raises = self.d.base.endswith("_overrideable")
            if raises or not has_kernel(self.d.name, "Meta") or self.d.kind != "functional":
                expected = "a functional overload that has a Meta kernel, or another mode, such as 'sizes'"
                raise metadata_error(self.where, f"{self.d.name}: output mode 'infer' of {name!r}", expected)
            self.shape.used.update(a.name for a in self.d.inputs)
            if index == 0:
                arguments = ", ".join(a.name for a in self.d.inputs)
                yield f"const auto made = infer<at::_ops::{self.d.identifier}>({arguments});"
            yield f"const at::Tensor {name} = made[{index}];"
            return
        operands = [self.values[a.name].code for a in self.d.inputs if a.tensor]
        if self.d.kind != "out":
            yield f"at::Tensor {name};"
        if rule.mode == "broadcast":
            dtype = self._compiled(self.shape, rule.dtype, "dtype", "dtype").code
            yield f"broadcast({name}, {dtype}, {{{', '.join(operands)}}});"
            return
        if rule.of not in _ITERATORS:
            raise metadata_error(
                self.where, f"{self.d.name}: of: {rule.of!r}{suggest_nearest(rule.of, _ITERATORS)}", "an iterator"
            )
        yield f"auto op = at::TensorIterator::{rule.of}({', '.join([name, *operands])});"
        if self.d.kind != "out":
            yield f"{name} = op.output();"

    def _like(self, name: str, rule: OutputRule) -> str:
        """Return the C++ of the tensor from which the output ``name`` takes its device and memory format.

        It is the tensor that ``rule`` names. If ``rule`` names none, it is the first tensor argument.
        """
        # Without ``of`` the first tensor argument gives the device and the format.
        first = next((a.name for a in self.d.inputs if a.tensor), name)
        return self._tensor(name, "of", rule.of or first)

    def _tensor(self, output: str, field: str, name: str) -> str:
        """Return the C++ of the tensor argument ``name``. The rule of the output ``output`` has this name under the key
        ``field``.

        For a list of tensors, return its first tensor. Raise ``SL901`` if ``name`` is no tensor argument.
        """
        if name not in self.values or self.values[name].kind not in ("tensor", "tensors"):
            got = f"{self.d.name}: output {output!r}, {field}: {name!r}{suggest_nearest(name, self.values)}"
            raise metadata_error(self.where, got, "a tensor argument")
        if self.values[name].kind == "tensors":
            return f"list_of({self.values[name].code}).front()"
        self.shape.used.add(name)
        return self.values[name].code

    def _let_statements(self) -> Iterator[str]:
        """Yield, in order, the C++ statements that define the variables under ``let`` in the metadata entry."""
        expressions = [*self.entry.let.values(), *(e for _, e in self._graphs())]
        expressions += [u.graph for u in self.entry.updates.values()]
        for name, source in self.entry.let.items():
            # A binding that is indexed has several outputs, for which other C++ is generated.
            many = any(f"{name}[" in e for e in expressions)
            value = self._compiled(self.graph, source, "nodes" if many else "node", f"let {name!r}")
            self.graph.lets[name] = TypedExpression(value.kind, f"l_{name}", value.length)
            yield f"const auto l_{name} = {value.code};"

    def _graphs(self) -> Iterator[tuple[str, str]]:
        """Yield the name of each result, and the expression of the metadata entry that computes it.

        Raise ``SL901`` if a result has no expression.
        """
        results = self._result_names()
        if isinstance(self.entry.graph, str):
            # One expression cannot give several results.
            if len(results) != 1 or not self.entry.graph:
                raise metadata_error(
                    self.where,
                    f"{self.d.name}: graph {self.entry.graph!r}",
                    f"an expression for each of {', '.join(results)}",
                )
            yield results[0], self.entry.graph
            return
        for name in results:
            if name not in self.entry.graph:
                raise metadata_error(
                    self.where,
                    f"{self.d.name}: graph has no {name!r}",
                    f"an expression for each of {', '.join(results)}",
                )
            yield name, self.entry.graph[name]

    def _updates(self) -> Iterator[tuple[str, str, str, str]]:
        """Yield ``(argument, tensor, condition, value)`` for each argument to which the call writes besides its
        results, such as running statistics.

        ``argument`` is the name. The others are C++: the tensor, the condition for the write, and the new value. Raise
        ``SL901`` if the name is that of a result, or is not that of a tensor.
        """
        for name, update in self.entry.updates.items():
            if name in self._result_names():
                raise metadata_error(
                    self.where, f"{self.d.name}, updates: {name!r} is an output", "an argument that is none"
                )
            if self.values.get(name, TypedExpression("", "")).kind != "tensor":
                got = f"{self.d.name}, updates: {name!r}{suggest_nearest(name, self.values)}"
                raise metadata_error(self.where, got, "a tensor argument")
            when = self._compiled(self.plain, update.when, "bool", "when").code if update.when else "true"
            graph = self._compiled(self.graph, update.graph, "node", f"update of {name!r}").code
            yield name, self.values[name].code, when, graph

    def _how(self, name: str) -> str:
        """Return the last C++ argument of the call that creates the graph's input ``name``. It sets the input's dtype.

        An example, with the comma before it, is ``, compute``. The result is an empty string for an input that the
        metadata entry marks as ``raw``, which keeps its own dtype.
        """
        how = self.entry.inputs.get(name, "compute")
        return "" if how == "raw" else f", {DTYPES.get(how, 'compute')}"

    def _key_statements(self) -> Iterator[str]:
        """Yield the C++ statements that describe a call in the variable ``call``.

        They add the inputs of the vendor's graph, and the values that are built into the graph. These values are a part
        of the graph's cache key.
        """
        for a in self.d.inputs:
            if a.name in self.graph.inputs:
                yield self._input_statement(a)
            # The graph depends on the tensor's sizes and dtype, and not on its values.
            elif a.tensor and a.name in self.graph.used:
                yield f"call.attribute(geometry({self.values[a.name].code}));"
            if a.name in self.graph.baked:
                yield f"call.attribute({a.name});"
        # Two calls with other outcomes need different graphs, so outcomes belong to the cache key.
        for condition in self.graph.conditions:
            yield f"call.attribute({condition});"
        yield f"call.attribute({self._promoted_dtype() or 'compute'});"

    def _input_statement(self, a: AtenArgument) -> str:
        """Return the C++ statement that makes the argument ``a`` an input of the vendor's graph.

        The value of an input is not built into the graph.
        """
        tensor = self.values[a.name].code
        if a.tensor and self._how(a.name) == ", compute":
            tensor = f"computed({tensor}, {self._promoted_dtype() or 'compute'}, compute)"
        inputs = {
            "tensor": f"call.input({tensor});",
            "tensors": f"call.inputs(list_of({a.name}));",
            "scalar": f"call.scalar({a.name}, {self._number_dtype()});",
            "scalar?": f"call.scalar(*{a.name}, compute);",
        }
        statement = inputs[argument_kind(a)]
        if a.type.startswith("Tensor?["):  # which are given decides the graph's form
            return f"call.attribute(attributes::places({a.name})); {statement}"
        return f"call.attribute(has({a.name})); if (has({a.name})) {statement}" if a.type.endswith("?") else statement

    def _number_dtype(self) -> str:
        """Return the C++ of the dtype in which a number is an input of the vendor's graph.

        A comparison on the CPU rounds the number to the dtype of its other operand, so that 0.1 equals itself in
        float16. Other overloads compute with the number as it is.
        """
        promoted = self._promoted_dtype()
        rounds = self.d.base in _COMPARISONS and promoted and not _NARROW.isdisjoint(self._accepted())
        return f"compared({promoted}, compute)" if rounds else "compute"

    def _number_conditions(self) -> Iterator[str]:
        """Yield a C++ condition for each number that is an input of the vendor's graph. It says whether the input's
        dtype can represent the number.

        A number that becomes infinite or 0 in its dtype sends the call to the CPU. A tensor argument can be a Python
        number only if the overload has several tensors.
        """
        several = self.entry.template != "matmul" and sum(a.tensor for a in self.d.inputs) > 1
        promoted = self._promoted_dtype()
        narrow = not _NARROW.isdisjoint(self._accepted()) if promoted else self.graph.narrow
        for a in self.d.inputs:
            kind, how = argument_kind(a), self._how(a.name).removeprefix(", ")
            if a.name not in self.graph.inputs or not how:
                continue
            if kind == "tensor" and several and (narrow if how == "compute" else how in _NARROW_CODES):
                yield f"holds({self.values[a.name].code}, {promoted or how if how == 'compute' else how})"
            elif kind in ("scalar", "scalar?") and self.graph.narrow:
                yield f"holds({a.name}, compute)"
            elif kind == "scalar" and self._number_dtype() != "compute":
                yield f"holds({a.name}, {self._number_dtype()})"

    def _nodes(self) -> Iterator[str]:
        """Yield the C++ statements that define the graph's inputs.

        There is one variable for each argument that the vendor's graph reads.
        """
        for a in self.d.inputs:
            if a.name not in self.graph.inputs:
                continue
            how = self._how(a.name)
            if argument_kind(a) == "tensors":
                yield f"const auto n_{a.name} = inputs_of(g, next, list_of({a.name}).size(){how});"
                continue
            # Integers must wrap around in torch's dtype before they are widened.
            promoted = self._promoted_dtype() if how == ", compute" else ""
            node = f"promoted(g, next++, {promoted}, compute)" if promoted else f"g.input(next++{how})"
            yield f"const Node n_{a.name} = " + (
                f"has({a.name}) ? {node} : Node();" if a.type.endswith("?") else f"{node};"
            )

    def _promoted_dtype(self) -> str:
        """Return the C++ of the dtype to which torch's structured operator promotes its inputs.

        Integers wrap around in this dtype before they are widened for the computation. Return an empty string for an
        operator without promotion.
        """
        decides = self._computation_dtype()
        return decides if decides.startswith("op.") else ""

    def _uses(self) -> dict[str, str]:
        """Return how the metadata entry uses each argument, by the argument's name.

        An argument is an input of the graph, an attribute (a value built into the graph), or used in a guard or for a
        shape. Raise ``SL903`` for an argument without a use.
        """
        # An argument that is an input and an attribute counts as an input.
        attributes = (self.graph.used | self.graph.baked) - self.graph.inputs
        used = {"graph input": self.graph.inputs, "attribute": attributes}
        used |= {"guard": self.plain.used, "shape": self.shape.used}
        return uses_of(self.where, self.d, self.entry, self.family, used)


def _takes_nodes(function: VendorFunction, count: int) -> bool:
    """Return whether the vendor's ``function`` computes a value of the graph from ``count`` other values of the graph.

    Return False if the function requires a further argument.
    """
    nodes, rest = function.parameters[:count], function.parameters[count:]
    kinds = [p.kind for p in nodes] == ["node"] * count
    return function.returns == "node" and not function.unusable and kinds and all(p.optional for p in rest)


def build_vocabulary(metadata: Metadata, functions: Functions, enums: Mapping[str, Mapping[str, str]]) -> Vocabulary:
    """Return the vendor's functions, enums and operators that expressions of ``metadata`` may use.

    ``functions`` and ``enums`` are those of the vendor, by name. Raise ``SL902`` if the metadata names an unsuitable
    function for an operator such as ``+``. Raise ``SL901`` if it names an unknown parameter.
    """
    for symbol, name in metadata.target.operators.items():
        operands = 3 if symbol == "if else" else 1 if symbol.startswith("unary") else 2
        if not any(_takes_nodes(function, operands) for function in functions.get(name, ())):
            known = "; ".join(map(str, functions.get(name, ())))
            raise error(
                "SL902",
                where=f"{metadata.places[('operators', symbol)]}: operators: {symbol!r}",
                got=known or f"{name!r}{suggest_nearest(name, functions)}",
                expected=f"a vendor function that makes a node of {operands} nodes",
            )
    parameters = {p.name for overloads in functions.values() for f in overloads for p in f.parameters}
    for name in metadata.target.index_parameters:
        if name not in parameters:
            got = f"index_parameters: {name!r}{suggest_nearest(name, sorted(parameters))}"
            raise metadata_error(metadata.places[("index_parameters",)], got, "a parameter of a vendor function")
    return Vocabulary(functions, enums, metadata.target.operators, frozenset(metadata.target.index_parameters))
