"""``shiplap audit --installed --functions``: functions of a package, each wrong in one way, beside right ones."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from shiplap.audit.installed import checks, engine, gradients
from shiplap.audit.installed import functions as functions_module
from shiplap.audit.installed.apart import RecordedCalls, recipes_of_calls
from shiplap.audit.installed.engine import InstalledRequest, audit_installed_op
from shiplap.audit.installed.functions import FunctionRecorder, find_functions, functions_in, kind_of
from shiplap.audit.installed.python_function import PythonFunction
from shiplap.audit.installed.recipes import CallRecipe, TakenCall, evaluate, recipe_from_text, recipe_of_call
from shiplap.audit.installed.result import InstalledFinding, InstalledOp, InstalledReport
from shiplap.audit.installed.schedule import audit_installed_ops, prepare_process
from shiplap.audit.installed.script import write_script
from shiplap.cli.audit_installed import InstalledOptions, audit_package
from shiplap.render.lines import print_lines
from shiplap.scaffold.calls import DispatchedCall, DispatchRecorder, SeenTensor
from shiplap_testing.effort import sampled
from shiplap_testing.forked import python

LAYERS = """\
import enum
import torch
from torch.autograd import Function


class Mode(enum.Enum):
    PLAIN = 1
    DOUBLED = 2


class Timer:
    def __init__(self):
        self.enabled, self.begins = True, {}


class Base(Function):
    @staticmethod
    def forward(cls, ctx, x):
        return x * 2


class ByClassMethod(Base):
    @classmethod
    def forward(cls, ctx, x, mode, timer, masks, activation):
        assert timer.enabled
        return super().forward(cls=cls, ctx=ctx, x=activation(x)) * mode.value * int(masks[0][0])

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None, None, None


def double_ref(x):
    return x + x


def wrong_reference_ref(x):
    return x + x + 1


def packed(x):
    return torch.as_strided(x, x.shape, torch.empty(x.shape, device="meta").stride(), x.storage_offset())


class Double(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def double(x: torch.Tensor, *, times: int = 1):
    for _ in range(times):
        x = Double.apply(x)
    return x


def through(x: torch.Tensor, layer):
    return Double.apply(layer(x))


class Square(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class WrongReference(Double):
    pass


class WrongGradient(Double):
    @staticmethod
    def backward(ctx, grad):
        return grad * 3


class IgnoresStrides(Double):
    @staticmethod
    def forward(ctx, x):
        return packed(x) * 2


class IgnoresStridesOfGradient(Double):
    @staticmethod
    def backward(ctx, grad):
        return packed(grad.new_zeros(grad.numel()).view_as(grad).copy_(packed(grad))) * 2 if grad.numel() > 1 else grad


class NeedsPackedGradient(Double):
    @staticmethod
    def backward(ctx, grad):
        return grad.view(-1).mul(2).view(grad.shape)


class WritesToGradient(Double):
    @staticmethod
    def backward(ctx, grad):
        return grad.mul_(2)


class StoresGradientInArgument(Function):
    @staticmethod
    def forward(ctx, x):
        result = x * x
        if ctx.needs_input_grad[0]:
            x.detach().mul_(2)
            ctx.gradient = x.detach()
        return result

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.gradient


class WritesToArgument(Double):
    @staticmethod
    def forward(ctx, x):
        result = x * 2
        x.zero_()
        return result


class SecondDerivativeIsLost(Square):
    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0].detach() * grad


class OneGradientIsMissing(Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        both = all(ctx.needs_input_grad)
        return grad * weight, grad * x if both else torch.zeros_like(weight)


class BackwardOfOneDtype(Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


held = {}


class SharedMemory(Double):
    @staticmethod
    def forward(ctx, x):
        return torch.mul(x, 2, out=held.setdefault((x.shape, x.dtype), torch.empty_like(x)))
"""
SQUARE = (6, 6)
WRONG = {
    "WrongReference": "reference",
    "WrongGradient": "gradient",
    "IgnoresStrides": "layout",
    "NeedsPackedGradient": "gradient_layout",
    "IgnoresStridesOfGradient": "gradient_layout",
    "WritesToGradient": "gradient_mutation",
    "StoresGradientInArgument": "gradient_mutation",
    "WritesToArgument": "mutation",
    "SecondDerivativeIsLost": "double_backward",
    "OneGradientIsMissing": "gradient_alone",
    "BackwardOfOneDtype": "autocast",
    "SharedMemory": "alias",
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory):
    """A package of three modules; one of them raises when it is imported, and one ends its process."""
    root, name = tmp_path_factory.mktemp("functions"), "undeclared_functions"
    folder = root / name
    (folder / "tests").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "layers.py").write_text(LAYERS)
    (folder / "raises.py").write_text("import no_such_module\n")
    (folder / "ends.py").write_text("import os\nos._exit(3)\n")
    (folder / "tests" / "__init__.py").write_text("raise RuntimeError('tests are not imported')\n")
    prepare_process()
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(root))
        importlib.import_module(name)
        yield name, root
    for module in [m for m in sys.modules if m.partition(".")[0] == name]:
        del sys.modules[module]


@pytest.fixture(scope="module")
def found(package):
    return find_functions(package[0])


def seen(*shapes: tuple[int, ...]) -> CallRecipe:
    tensors = {n: SeenTensor("float32", s, "cpu", -1.0, 1.0) for n, s in zip(("x", "weight"), shapes, strict=False)}
    return recipe_of_call(DispatchedCall(tensors, ()), 5)


def request() -> InstalledRequest:
    return InstalledRequest("undeclared_functions", "1", seed=5, seconds=4.0)


def audited(found, name: str, monkeypatch, *shapes: tuple[int, ...]) -> InstalledOp:
    monkeypatch.setattr(engine, "script_shows", lambda text, limits: True)
    address = f"undeclared_functions.layers:{name}"
    return audit_installed_op(address, found.functions[address], [seen(*shapes)] if shapes else (), request())


def test_modules_that_cannot_be_imported_are_left_out(found):
    assert set(found.failed) == {"undeclared_functions.raises", "undeclared_functions.ends"}
    assert "no_such_module" in found.failed["undeclared_functions.raises"]
    assert "ended the process" in found.failed["undeclared_functions.ends"]
    names = {name.partition(":")[2] for name in found.functions}
    assert names == {"ByClassMethod", "Double", "double", "Square", "through", *WRONG}


@pytest.mark.parametrize("name", sampled(WRONG, 3))
def test_a_wrong_function_is_named(found, monkeypatch, working_forks, name):
    shapes = (SQUARE, SQUARE) if name in ("OneGradientIsMissing", "BackwardOfOneDtype") else ((6, 4),)
    result = audited(found, name, monkeypatch, *shapes)
    assert WRONG[name] in [f.check for f in result.findings], result
    assert result.findings[0].source.startswith("PythonFunction(import_module('undeclared_functions.layers')")


@pytest.mark.parametrize("name", sampled(["Double", "Square", "double"], long=["Double", "double"]))
def test_a_right_function_has_no_finding(found, monkeypatch, working_forks, name):
    for shapes in ((), ((6, 4),)):  # searched and recorded
        result = audited(found, name, monkeypatch, *shapes)
        assert result.findings == (), result
        assert result.calls
        assert not result.unreached


def test_plain_versions_are_found_by_their_names(found):
    reference = {n.partition(":")[2]: f.reference.partition(":")[2] for n, f in found.functions.items() if f.reference}
    assert reference == {"Double": "double_ref", "double": "double_ref", "WrongReference": "wrong_reference_ref"}


def test_calls_are_recorded_where_python_makes_them(found):
    layers = importlib.import_module("undeclared_functions.layers")
    recorder = DispatchRecorder(())
    before = sys.getprofile()
    with FunctionRecorder(found.functions, recorder).mode():
        layers.double(torch.ones(3, 2), times=2)
        layers.Square.apply(torch.ones(5))
    assert sys.getprofile() is before
    calls = {n.partition(":")[2]: [dict(c.arguments) for c in seen] for n, seen in recorder.calls.items()}
    assert set(calls) == {"Double", "double", "Square"}
    assert calls["double"][0]["times"] == 2
    assert calls["double"][0]["x"].shape == (3, 2)
    assert list(calls["Square"][0]) == ["x"]


def test_a_function_whose_calls_pass_a_module_says_so(found, package, monkeypatch):
    layers, name = importlib.import_module("undeclared_functions.layers"), "undeclared_functions.layers:through"
    recorder = DispatchRecorder(())
    with FunctionRecorder(found.functions, recorder).mode():
        layers.through(torch.ones(3, 2), torch.nn.Identity())
    assert recorder.objects == {name: ["layer"]}
    monkeypatch.setattr(engine.OpAudit, "reach", lambda *a, **k: None)
    recorded, asked = RecordedCalls(objects=recorder.objects), InstalledRequest(package[0], "1", seed=5)
    (result,) = audit_installed_ops({name: found.functions[name]}, recorded, asked)
    assert result.unreached == "a script cannot make what recorded calls pass as layer"


def test_objects_that_a_script_can_make_are_recorded(found):
    numpy, layers = pytest.importorskip("numpy"), importlib.import_module("undeclared_functions.layers")
    recorder, name = DispatchRecorder(()), "undeclared_functions.layers:ByClassMethod"
    masks = [numpy.array([3], dtype=numpy.uint32)]
    with FunctionRecorder(found.functions, recorder).mode():
        layers.ByClassMethod.apply(
            torch.ones(3, 2), layers.Mode.DOUBLED, layers.Timer(), masks, torch.nn.functional.relu
        )
    assert not recorder.objects
    (call,) = recipes_of_calls(recorder, 5)[name]
    arguments = evaluate(recipe_from_text(repr(call)).texts())  # as a child process sends it
    assert arguments["mode"] is layers.Mode.DOUBLED
    assert arguments["masks"][0].dtype == numpy.uint32
    assert layers.ByClassMethod.apply(*arguments.values()).tolist() == [[12.0, 12.0]] * 3


def test_a_script_shows_the_finding_of_a_function(found, package):
    function = found.functions["undeclared_functions.layers:WritesToGradient"]
    arguments = {"x": "tensor(1, torch.float32, (6, 4))"}
    finding = InstalledFinding(function.name, "gradient_mutation", "", arguments, "recorded", source=function.source)
    text = write_script(finding, package[0], "1").replace("from __future__ import annotations", "")
    assert "shiplap." not in text
    done = python("-c", f"import sys; sys.path.append({str(package[1])!r})\n" + text)
    assert done.returncode == 1
    assert "the backward writes to the gradient of a result" in done.stdout


def test_the_command_audits_a_package_without_ops(package, monkeypatch, working_forks, tmp_path, capsys):
    monkeypatch.setattr(engine, "script_shows", lambda text, limits: True)
    script = Path(tmp_path / "calls.py")
    script.write_text(
        "import torch\nfrom undeclared_functions import layers\n"
        "layers.WrongGradient.apply(torch.randn(6, 4))\nlayers.Square.apply(torch.randn(6, 4))\n"
    )
    kept = {"undeclared_functions.layers:WrongGradient", "undeclared_functions.layers:Square"}
    real = functions_in
    monkeypatch.setattr(
        functions_module,
        "functions_in",
        lambda module: {n: f for n, f in real(module).items() if n in kept},
    )
    given = InstalledOptions(package[0], [], script, [], None, False, tmp_path / "out", 1, 4.0, 1, functions=True)
    assert audit_package(given, as_json=True, html=None) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["reached"] == printed["ops"] == 2
    assert [(f["op"].partition(":")[2], f["check"]) for f in printed["findings"]] == [("WrongGradient", "gradient")]
    assert (tmp_path / "out" / "undeclared_functions.layers.WrongGradient-gradient.py").exists()


def test_a_type_follows_from_the_annotation_the_default_or_the_name():
    import inspect

    def function(
        a: torch.Tensor, b: torch.Tensor | None, c: "list[torch.Tensor]", d=0.5, eps=None, n_groups=..., w=...
    ):
        pass

    kinds = [kind_of(p) for p in inspect.signature(function).parameters.values()]
    assert kinds == ["Tensor", "Tensor?", "Tensor[]", "float", "float?", "int", "Any"]


def test_a_backward_that_refuses_to_be_differentiated_is_honest():
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, grad):
            return 2 * ctx.saved_tensors[0] * grad

    with pytest.raises(checks.MissingRegistration, match="second derivative"):
        gradients.check_double_backward(PythonFunction(Once.apply), lambda: {"x": torch.tensor([0.5, -1.0, 2.0])})


@pytest.mark.parametrize(
    "forward",
    [
        pytest.param(lambda x: (x.float() * 3).sin().to(x.dtype), id="float32 inside"),
        pytest.param(torch.round, id="steps"),
    ],
)
def test_gradients_are_not_compared_where_finite_differences_say_nothing(forward):
    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return forward(x)

        @staticmethod
        def backward(ctx, grad):
            return grad

    with pytest.raises(checks.NotApplicable, match=r"differences depend|results are constant"):
        gradients.check_gradient(PythonFunction(Layer.apply), lambda: {"x": torch.tensor([0.3, -1.2, 2.1])})


def test_a_gradient_of_rounding_errors_is_not_compared_with_itself():
    tiny, given = [torch.tensor([3e-8, 0.0])], [torch.tensor([1.0, -2.0])]
    assert checks.difference([torch.zeros(2)], tiny)
    assert not checks.difference([torch.zeros(2)], tiny, floor=gradients.rounding_error([*tiny, *given]))
    wrong = [torch.tensor([1e-3, 0.0])]
    assert checks.difference([torch.zeros(2)], wrong, floor=gradients.rounding_error([*wrong, *given]))


def test_a_backward_that_is_another_one_in_each_call_is_one_finding():
    class Counted(torch.autograd.Function):
        calls = 0

        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            Counted.calls += 1
            return grad * Counted.calls

    op, make = PythonFunction(Counted.apply), lambda: {"x": torch.ones(2, 3)}
    assert gradients.check_gradient_mutation(op, make).startswith("the backward of an equal call returns something")
    for check in (gradients.check_gradient_layout, gradients.check_autocast):
        with pytest.raises(checks.NotApplicable, match="equal call"):
            check(op, make)


def test_an_argument_that_is_another_one_in_each_call_was_not_written_to():
    made = []

    def make():
        made.append(None)
        return {"x": torch.full((3,), float(len(made)))}

    assert not gradients.check_gradient_mutation(PythonFunction(lambda x: x * 2), make)

    def stored(x):
        x.detach().mul_(2 if x.requires_grad else 1)
        return x * 2

    text = gradients.check_gradient_mutation(PythonFunction(stored), make)
    assert text.startswith("a call whose arguments require gradients writes to x")


def test_any_error_of_a_backward_is_a_finding():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            raise KeyError("scale")

    problem = gradients.check_gradient(PythonFunction(Fails.apply), lambda: {"x": torch.tensor([0.5, -1.0])})
    assert problem == "the backward raises: 'scale'"


def test_a_search_draws_anew_what_another_function_returned():
    (drawn,) = TakenCall("package.layers:Double", CallRecipe({}), (("float32", (3, 2)),)).result_recipes()
    assert evaluate({"x": str(drawn)})["x"].shape == (3, 2)


def test_an_error_of_the_recorder_does_not_reach_the_program(found, monkeypatch):
    layers = importlib.import_module("undeclared_functions.layers")

    def fail(arguments):
        raise RuntimeError("no values under vmap")

    monkeypatch.setattr(functions_module, "make_python_call", fail)
    recorder = DispatchRecorder(())
    with FunctionRecorder(found.functions, recorder).mode():
        assert layers.double(torch.ones(2)).tolist() == [2.0, 2.0]
        assert sys.getprofile() is not None
    assert not recorder.calls


def test_many_findings_take_one_row_a_check():
    found = tuple(InstalledFinding(f"a::b{n}", "layout" if n % 2 else "fake", "p", {}, "") for n in range(30))
    report = InstalledReport("a", "1", [InstalledOp("a::b", 1, findings=found)])
    (table,) = [each for each in report.lines() if hasattr(each, "rows")]
    assert [row[0][0] for row in table.rows] == ["layout", "fake"]
    assert table.rows[0][1][0] == "15"


def test_twenty_findings_fit_on_a_screen():
    import io

    from rich.console import Console

    named = [f"package::some_operation_{n}_backward" for n in range(20)]
    found = tuple(
        InstalledFinding(n, "layout", "a word " * 60, {}, "", "33 in place of each size 9", "s.py") for n in named
    )
    printed = io.StringIO()
    print_lines(
        InstalledReport("package", "1", [InstalledOp("package::a", 1, findings=found)]).lines(),
        Console(file=printed, width=120),
    )
    assert len(printed.getvalue().splitlines()) <= 50
    assert "the folder of --out has a script for each finding" in printed.getvalue()


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x: (x * 127, (x * 127).trunc().int() + (x.dtype is torch.float64)), id="whole numbers"),
        pytest.param(lambda x: (x * 2, torch.fft.fft(x)), id="complex numbers"),
    ],
)
def test_float64_may_round_to_another_whole_number(function):
    assert not checks.check_precision(PythonFunction(function), lambda: {"x": torch.linspace(-1, 1, 9)})
    with_fault = PythonFunction(lambda x: tuple(t * (1 + (x.dtype is torch.float64)) for t in function(x)))
    assert "as float64" in checks.check_precision(with_fault, lambda: {"x": torch.linspace(-1, 1, 9)})


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x: (x,) * (1 + (x.dtype is torch.float64)), id="one more"),
        pytest.param(lambda x: (x, x if x.dtype is torch.float64 else x.int()), id="whole numbers for float32"),
    ],
)
def test_float64_gives_as_many_results(function):
    made = checks.check_precision(PythonFunction(function), lambda: {"x": torch.linspace(-1, 1, 9)})
    assert made.endswith("1 tensors in place of 2")
