"""Find all ops that an installed package registers, and draft each of them from its schema and from recorded calls.

Each drafted declaration is checked: its schema is the registered one, and it admits every recorded call.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from shiplap.declare.binding import declared_output_shape
from shiplap.declare.schema import public_schema
from shiplap.declare.signature import read_spec
from shiplap.dispatch.adopt import AdoptedOp
from shiplap.errors import ShiplapError, error
from shiplap.scaffold.calls import DispatchedCall, SeenTensor, as_empty_tensors
from shiplap.scaffold.foreign_ops import ForeignOps
from shiplap.scaffold.infer import InferredDeclaration, infer_declaration, infer_nothing
from shiplap.scaffold.module import DraftedOp, adopt_keywords, first_sentence, make_drafted_function
from shiplap.scaffold.probe import dtype_follows_arguments, probe_meta_kernel
from shiplap.scaffold.schema import SchemaForm, UndeclarableSchema, parse_schema
from shiplap.torch_private.dispatcher_library import (
    Overload,
    custom_op_module,
    find_overload,
    is_composite,
    library_namespaces,
    registered_names,
)

IsolateWork = Callable[[Callable[[], dict[str, Any]]], dict[str, Any]]
DraftProgress = Callable[[str, int, int], None]


@dataclass
class DraftedPackage:
    """The drafts of a package's ops. ``entries`` holds the drafted ops. ``left_out`` maps the name of each op without a
    draft to the reason.
    """

    entries: list[DraftedOp] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


def find_package_ops(
    package: str, load: Callable[[str], object], namespaces: Sequence[str] = ()
) -> dict[str, Overload]:
    """Return the torch ops that importing ``package`` registers, by name. ``load`` imports a module, or raises a
    ``ShiplapError``.

    An op that torch, or a module of another package, has registered is not among them. If ``namespaces``
    is not empty, return all ops of these namespaces instead.

    Raises:
        ShiplapError: ``SL501`` if the package registers no op.
    """
    # Ops that are registered by the import are the package's, unless it was imported before.
    loaded, before = package in sys.modules, registered_names()
    with ForeignOps(package) as foreign:
        load(package)
    # Taken after the import, since the package's modules hold their libraries only then.
    after, own = registered_names(), library_namespaces(package)
    torchs = library_namespaces("torch") - own

    def mine(name: str) -> bool:
        """Return whether the op ``name`` belongs to the package, or to one of the requested namespaces."""
        space, module = name.partition("::")[0], custom_op_module(name)
        if namespaces:
            return space in namespaces
        if module:
            return module == package or module.startswith(package + ".")
        imported = name not in before and name not in foreign.names and not loaded
        return space not in torchs and (space in own or space == package or imported)

    # Sorted, so that two drafts of one package can be compared.
    ops = {n: op for n in sorted(after) if mine(n) and (op := _overload_or_none(n)) is not None}
    if not ops:
        spaces = sorted({n.partition("::")[0] for n in after - before} - torchs)
        raise error(
            "SL501",
            where=package,
            what="the package has no op to draft",
            got=f"new namespaces: {', '.join(spaces)}" if spaces else "no op that was not there before the import",
            expected="ops in torch's dispatcher, such as torch.ops.torchvision.nms",
            fix="name the module that registers them, or a --namespace; draft a function with --from module:function",
        )
    return ops


def _overload_or_none(name: str) -> Overload | None:
    """Return the torch overload ``namespace::name.overload``, or None if Python cannot call it."""
    space, _, rest = name.partition("::")
    try:
        return find_overload(space, rest)
    except (AttributeError, RuntimeError):  # a schema without an implementation that Python may call
        return None


def installed_version(package: str) -> str:
    """Return the version of the installed distribution that has the module ``package``. Return an empty string if there
    is none.
    """
    try:
        distributions = importlib.metadata.packages_distributions().get(package.partition(".")[0], [package])
        return importlib.metadata.version(distributions[0])
    except importlib.metadata.PackageNotFoundError:
        return ""


def draft_ops(
    ops: Mapping[str, Overload],
    recorded: Mapping[str, Sequence[DispatchedCall]],
    package: str,
    report: DraftProgress = lambda what, done, total: None,
    *,
    isolate: IsolateWork = lambda work: work(),
    keep: Callable[[DraftedPackage], None] = lambda drafted: None,
) -> DraftedPackage:
    """Return a draft of each op, or the reason why it can have none. ``recorded`` holds the recorded calls by op
    name. The sentence about an op is taken from the docstrings of ``package``.

    ``report(name, done, total)`` is called before each op is drafted, and ``keep`` after each op with the drafts so
    far. ``isolate(work)`` runs ``work`` and returns its result, made of dicts, lists and scalars. A caller passes one
    that uses a separate process, so that a crash of a meta kernel does no harm.
    """
    result, docs, taken = DraftedPackage(), _first_sentences(package), set[str]()
    for done, (name, overload) in enumerate(ops.items()):
        report(name, done, len(ops))
        doc = docs.get(name.partition("::")[2].split(".")[0], ("", ""))
        told = isolate(partial(_draft_as_data, overload, recorded.get(name, ())))
        if reason := told.get("left_out"):
            result.left_out[name] = reason
        else:
            # The tuples were lists in the plain data.
            parts = told["known"]
            known = InferredDeclaration(**{**parts, **{n: tuple(parts[n]) for n in ("requires", "open")}})
            entry = DraftedOp(parse_schema(overload._schema), known, *doc, told["notes"])
            result.entries.append(entry.renamed(taken))
        keep(result)
    return result


def _draft_as_data(overload: Overload, recorded: Sequence[DispatchedCall]) -> dict[str, Any]:
    """Return the draft of one op as a dict that another process can send. It holds the inferred declaration and the
    notes for the author. ``recorded`` are the recorded calls of the op. If the op can have no draft, return
    ``{"left_out": reason}``.
    """
    try:
        drafted = draft_op(parse_schema(overload._schema), overload, recorded)
    except UndeclarableSchema as e:
        return {"left_out": str(e)}
    except ShiplapError as e:
        return {"left_out": f"{e.id} {e.what}: {e.where}: got {e.got}"}
    return {"known": asdict(drafted.known), "notes": list(drafted.notes)}


def draft_op(
    form: SchemaForm, overload: Overload, recorded: Sequence[DispatchedCall], doc: tuple[str, str] = ("", "")
) -> DraftedOp:
    """Return the draft of the op with the schema ``form``, inferred from ``recorded``, its recorded calls. If the
    inferred dims and dtypes would refuse a recorded call, the draft has only the types of the schema and states the
    reason. ``doc`` is a sentence about the op and the name of the function that it was taken from.

    Raises:
        ShiplapError: SL1xx for a schema that no declaration has.
    """
    probed = probe_meta_kernel(form, overload, recorded[0] if recorded else None)
    known = infer_declaration(form, recorded, probed, lambda: dtype_follows_arguments(form, overload, probed))
    problem = _why_draft_fails(form, known, overload, recorded)
    if problem:
        known = infer_nothing(form, f"a declaration with inferred dims has another result: {problem}")
        # Checked once more, so that a schema which no declaration has raises its own error.
        _why_draft_fails(form, known, overload, ())
    notes = (
        []
        if recorded or not is_composite(form.name)
        else ["made of other ops: calls of it are recorded only where Python makes them"]
    )
    return DraftedOp(form, known, *doc, notes)


def _why_draft_fails(
    form: SchemaForm, known: InferredDeclaration, overload: Overload, recorded: Sequence[DispatchedCall]
) -> str:
    """Return the reason why ``known``, the declaration inferred for the schema ``form``, does not hold for the recorded
    calls. Return an empty string if it holds. Raise ``ShiplapError`` if even a declaration without inferred parts is
    refused.
    """
    try:
        return why_draft_misfits(form, known, overload, recorded)
    except ShiplapError as e:
        if not known.where or (not recorded and known.reference):
            raise
        return f"{e.id} {e.what}: got {e.got}, expected {e.expected}"


def _first_sentences(package: str) -> dict[str, tuple[str, str]]:
    """Return ``{function name: (sentence, full name)}`` for the Python functions of the package that have a docstring.
    ``sentence`` is the first sentence of the docstring. An op often has the name of its function.
    """
    documents: dict[str, tuple[str, str]] = {}
    # A copy, since another thread may import a module meanwhile.
    for name, module in list(sys.modules.items()):
        if module is None or not (name == package or name.startswith(package + ".")):
            continue
        for key, value in list(vars(module).items()):
            documented = inspect.isfunction(value) and value.__doc__ and value.__module__.startswith(package)
            if documented and key not in documents:
                documents[key] = first_sentence(value.__doc__), f"{value.__module__}.{key}"
    return documents


def why_draft_misfits(
    form: SchemaForm, known: InferredDeclaration, overload: Overload, recorded: Sequence[DispatchedCall]
) -> str:
    """Return the number of the first recorded call that does not fit ``known``, the drafted declaration of the schema
    ``form``, and the reason, as text. The declaration would refuse such a call, or give other result sizes. Return an
    empty string if all calls fit.

    Raises:
        ShiplapError: SL1xx when the declaration itself is refused.
    """
    function = make_drafted_function(form, known)
    op: AdoptedOp[..., Any] = AdoptedOp(read_spec(form.name, function, **adopt_keywords(form, known)), function)
    wanted = str(overload._schema).partition("(")[2].partition(")")[0]
    if known.reference and "*" not in public_schema(op.spec) and len(op.spec.args) != len(form.arguments):
        return f"other arguments than {wanted}"
    for number, call in enumerate(recorded, 1):
        if problem := _why_call_refused(op, call):
            return f"recorded call {number}: {problem}"
    return ""


def _why_call_refused(op: AdoptedOp[..., Any], call: DispatchedCall) -> str:
    """Return the reason why the drafted declaration of ``op`` refuses a recorded call or declares other result sizes.
    Return an empty string if the call fits.
    """
    try:
        bound = op.bind([as_empty_tensors(v, "meta") for v in call.arguments.values()])
        # A traced op takes its sizes from the reference, so none are declared.
        shapes = [] if op.spec.traced else [_known_sizes(o, bound.env, op) for o in op.spec.outputs]
    except ShiplapError as e:
        return f"{e.id} {e.what}: got {e.got}, expected {e.expected}"
    fresh = [
        r
        for r, declared in zip(call.results, op.spec.returns or op.spec.outputs, strict=True)
        if _is_fresh_result(declared)
    ]
    for made, shape in zip(fresh, shapes, strict=False):
        sizes = made.shape if isinstance(made, SeenTensor) else ()
        if len(sizes) != len(shape) or any(s is not None and s != n for s, n in zip(shape, sizes, strict=True)):
            return f"a result of shape {sizes}, declared {shape}"
    return ""


def _is_fresh_result(declared: Any) -> bool:
    """Return whether a declared result is a new tensor and not an alias of an argument."""
    return not getattr(declared, "alias", "")


def _known_sizes(out: Any, env: Any, op: AdoptedOp[..., Any]) -> list[Any]:
    """Return the sizes that the declaration gives for the output ``out`` in a call whose named dims have the sizes
    ``env``. A size that depends on the values of tensors is None.
    """
    # -1 stands for a size that only the data knows, as in recorded calls.
    marked = {**env, **dict.fromkeys(op.spec.dynamic, -1)}
    return [None if n == -1 else n for n in declared_output_shape(out, marked)]
