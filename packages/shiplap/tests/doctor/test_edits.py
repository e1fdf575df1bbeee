"""Each editor changes the program's text as its remedy says, and proposes nothing where it does not apply."""

from __future__ import annotations

import random
import textwrap
from pathlib import Path

import pytest
import torch

from shiplap.doctor import (
    edits,
    edits_of_calls,
    edits_of_compilation,
    edits_of_draws,
    edits_of_functions,
    edits_of_shortcuts,
    edits_of_values,
    edits_of_versions,
)
from shiplap.doctor.edits import Case, Editor
from shiplap.doctor.scratch import apply_edits
from tests.doctor.programs import CountingBackend, proposals


def test_a_setting_goes_below_the_imports_once(tmp_path: Path) -> None:
    editor = edits.add_setting("torch._dynamo.config.capture_scalar_outputs = True")
    (changed,) = proposals(tmp_path, '"""Doc."""\nimport torch\n\nx = 1\n', editor)
    assert changed == '"""Doc."""\nimport torch\ntorch._dynamo.config.capture_scalar_outputs = True\n\nx = 1\n'
    assert proposals(tmp_path, changed, editor) == []
    (imported,) = proposals(tmp_path, "from model import run\nrun()\n", editor)
    assert "import torch\n" in imported


def test_torchs_own_words_name_the_setting(tmp_path: Path) -> None:
    words = "consider using torch._dynamo.config.force_parameter_static_shapes = False to allow dynamism"
    (changed,) = proposals(tmp_path, "import torch\n", edits.add_hinted_settings, text=words)
    assert "torch._dynamo.config.force_parameter_static_shapes = False\n" in changed


def test_a_setting_that_hides_errors_is_no_remedy(tmp_path: Path) -> None:
    words = "set torch._dynamo.config.suppress_errors = True to fall back to eager"
    assert proposals(tmp_path, "import torch\n", edits.add_hinted_settings, text=words) == []


def test_a_print_is_moved_and_its_shapes_become_texts(tmp_path: Path) -> None:
    source = "import torch\ndef f(x):\n    print('h', x.shape, x.norm())  # HERE\n"
    plain, texts = proposals(tmp_path, source, edits.reorder_print, "print")
    assert "reorderable_logging_functions.add(print)" in plain
    assert "print('h', str(x.shape), x.norm())" in texts


@pytest.mark.parametrize("keywords", ["end=''", "sep=' '", "file=log"])
def test_a_print_with_keywords_is_not_moved(tmp_path: Path, keywords: str) -> None:
    """Torch 2.13 makes the moved call without them."""
    source = f"import torch\ndef f(x, log):\n    print('.', x, {keywords})  # HERE\n"
    assert proposals(tmp_path, source, edits.reorder_print, "print") == []


@pytest.mark.parametrize(
    ("subject", "source"),
    [
        ("x, dim 1", "L['x']:1"),
        ("self.layer_idx", "L['self'].layer_idx"),
        ("counts[0]", "L['counts'][0]"),
        ("len(x)", ""),
    ],
)
def test_what_varied_is_named_as_a_source(tmp_path: Path, subject: str, source: str) -> None:
    changed = proposals(tmp_path, "import torch\n", edits.add_dynamic_source("dynamic_sources"), subject)
    assert [f'dynamic_sources = "{source}"' in text for text in changed] == [True] * bool(source)


def test_a_second_source_joins_the_first(tmp_path: Path) -> None:
    """A second setting would replace the first one."""
    editor = edits.add_dynamic_source("dynamic_sources")
    (first,) = proposals(tmp_path, "import torch\n", editor, "x, dim 1")
    (both,) = proposals(tmp_path, first, editor, "y[0], dim 0")
    assert "dynamic_sources = \"L['x']:1,L['y'][0]:0\"\n" in both
    assert both.count("dynamic_sources") == 1
    assert proposals(tmp_path, both, editor, "x, dim 1") == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("@torch.compile\ndef f(x): ...\n", "@torch.compile(dynamic=True)\ndef f(x): ...\n"),
        ("@torch.compile(dynamic=False)\ndef f(x): ...\n", "@torch.compile(dynamic=True)\ndef f(x): ...\n"),
        ("g = torch.compile(f)\n", "g = torch.compile(f, dynamic=True)\n"),
        ("model.compile()\n", "model.compile(dynamic=True)\n"),
    ],
)
def test_compile_dynamic(tmp_path: Path, before: str, after: str) -> None:
    assert proposals(tmp_path, "import torch\n" + before, edits_of_compilation.compile_dynamic) == [
        "import torch\n" + after
    ]


COMPILED = """import torch
g, h = torch.compile(f), torch.compile(f)
k = torch.compile(
    f,
)
@torch.compile
def f(x): ...
"""


@pytest.mark.parametrize(
    ("site", "before", "after"),
    [
        (("program.py", 2, 7), "g, h = torch.compile(f)", "g, h = torch.compile(f, dynamic=True)"),
        (("program.py", 2, 25), "torch.compile(f)\nk", "torch.compile(f, dynamic=True)\nk"),
        (("program.py", 4, 8), "    f,\n)", "    f,\ndynamic=True)"),  # a line inside of the call
        (("program.py", 6, 1), "@torch.compile\n", "@torch.compile(dynamic=True)\n"),
        (("other.py", 2, 7), "", ""),
    ],
)
def test_only_the_call_that_compiled_the_function_becomes_dynamic(
    tmp_path: Path, site: tuple[str, int, int], before: str, after: str
) -> None:
    """Other calls of the line, the file and the folder compile functions of their own."""
    for file in ("program.py", "other.py"):
        (tmp_path / file).write_text(COMPILED)
    case = Case(tmp_path, "program.py", "program.py", 7, "f", "x", "", compiled_at=(site,))
    (found,) = edits_of_compilation.compile_dynamic(case)
    file = site[0]
    changed = apply_edits({}, tmp_path, found)
    if before:
        assert changed == {file: COMPILED.replace(before, after)}
    assert [edit.file for edit in found] == [file]


def test_where_it_is_not_known_what_compiled_it_no_other_file_is_edited(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(COMPILED)
    assert proposals(tmp_path, "import torch\ndef f(x): ...  # HERE\n", edits_of_compilation.compile_dynamic) == []


BRANCHES = [
    ("if x.sum() > 0:  # HERE\n    x = x + 1\nreturn x", "x = torch.where(x.sum() > 0, x + 1, x)"),
    ("if not x.any():  # HERE\n    x += 1\nelse:\n    x = x * 2\nreturn x", "x = torch.where(~x.any(), x + 1, x * 2)"),
    ("if x.max().item() > 3:  # HERE\n    return x\nreturn -x", "return torch.where(x.max() > 3, x, -x)"),
    ("return x if x.all() else -x  # HERE", "return torch.where(x.all(), x, -x)"),
]


@pytest.mark.parametrize(("body", "expected"), BRANCHES)
def test_where(tmp_path: Path, body: str, expected: str) -> None:
    source = "import torch\n\n\ndef f(x):\n" + textwrap.indent(body, "    ") + "\n"
    (changed,) = proposals(tmp_path, source, edits_of_values.where_for_branch)
    assert expected in changed
    assert "if " not in changed.partition("def f")[2]


@pytest.mark.parametrize("editor", [edits_of_values.where_for_branch, edits_of_values.cond_for_branch])
def test_an_elif_is_no_statement_of_its_own(tmp_path: Path, editor: Editor) -> None:
    """What stands in its place would run behind the choice, whatever side was taken."""
    source = "def f(x, n):\n    if n:\n        x = x + 1\n    elif x.any():  # HERE\n        x = x * 2\n    return x\n"
    assert proposals(tmp_path, source, editor) == []
    assert proposals(tmp_path, source.replace("elif", "if"), editor) != []


def test_where_leaves_a_branch_that_does_more_than_pick(tmp_path: Path) -> None:
    source = """
        import torch
        def f(x):
            if x.sum() > 0:  # HERE
                log(x)
            return x
    """
    assert proposals(tmp_path, source, edits_of_values.where_for_branch) == []
    assert proposals(tmp_path, source, edits_of_values.cond_for_branch) == []


def test_an_early_return_is_picked_at_the_end(tmp_path: Path) -> None:
    source = """
        import torch
        def f(layers, x):
            for layer in layers:
                x = layer(x)
                if x.max() > 1 and not x.sum() < 0:  # HERE
                    return x * 2
            return x
    """
    (changed,) = proposals(tmp_path, source, edits_of_functions.where_for_exit)
    ran: dict = {}
    exec(changed, ran)
    exec(textwrap.dedent(source), before := {})
    layers = [lambda x: x + 0.3, lambda x: x * 3, lambda x: x - 9]
    for start in (0.0, 0.8, -5.0):
        x = torch.full((2,), start)
        assert torch.equal(ran["f"](layers, x), before["f"](layers, x))
    assert torch.equal(ran["f"]([], x), x)
    assert "if x.max()" not in changed


@pytest.mark.parametrize(
    "between", ["x += 1", "x.add_(1)", "self.count = 1", "x[0] = 1", "y = (z := x + 1)", "total = x.sum_of(1)"]
)
def test_an_early_return_before_a_write_stays(tmp_path: Path, between: str) -> None:
    """The early value may be the object that is written to, and what outlives the call would change in each."""
    source = f"""
        import torch
        def f(self, x):
            if x.sum() > 0:  # HERE
                return x
            {between}
            return x
    """
    found = proposals(tmp_path, source, edits_of_functions.where_for_exit)
    assert len(found) == ("total" in between)


def test_an_early_return_outside_of_loops_is_picked_as_well(tmp_path: Path) -> None:
    source = """
        import torch
        def f(x, early):
            if x.sum() > 0:  # HERE
                return x
            y = x.cos()
            return y + early
    """
    (changed,) = proposals(tmp_path, source, edits_of_functions.where_for_exit)
    assert "early_, is_early = x, x.sum() > 0" in changed
    assert "return torch.where(is_early, early_, y + early)" in changed


@pytest.mark.parametrize(
    "body",
    [
        "while True:\n    x = x + 1\n    if x.sum() > 0:  # HERE\n        return x",
        "if x.sum() > 0:  # HERE\n    return x\nif x.sum() < -9:\n    return -x\nreturn x.cos()",
        "if x.sum() > 0:  # HERE\n    return x, 1\nx = x.cos()\nreturn x, 2",
        "if x.sum() > 0:  # HERE\n    print(x)\n    return x\nx = x.cos()\nreturn x",
        "if x.sum() > 0:  # HERE\n    return x\nx.cos()",
    ],
)
def test_other_early_returns_stay(tmp_path: Path, body: str) -> None:
    source = "import torch\ndef f(x):\n" + textwrap.indent(body, "    ") + "\n"
    assert proposals(tmp_path, source, edits_of_functions.where_for_exit) == []


LOOP = """
    import torch
    def f(u, limit):
        for scale in (1.0, 0.5, 0.25, 0.125):
            v = u * scale
            change = (v - u).abs().max()
            u = u - v
            if change < limit:  # HERE
                break
            u = u * 2
        return u, v
"""


def test_a_loop_with_a_break_runs_all_rounds(tmp_path: Path) -> None:
    (changed,) = proposals(tmp_path, LOOP, edits_of_functions.where_for_break)
    exec(changed, ran := {})
    exec(textwrap.dedent(LOOP), before := {})
    for limit in (9.0, 0.3, 0.1, 0.0):
        u = torch.full((2,), 0.7)
        for got, wanted in zip(ran["f"](u, limit), before["f"](u, limit), strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    assert "break" not in changed
    graphs = CountingBackend()
    torch.compile(ran["f"], backend=graphs, fullgraph=True)(torch.ones(2), torch.tensor(0.3))
    assert graphs.frame_count == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("break\n", "return u, v\n"),
        ("u = u * 2", "u *= 2"),
        ("u = u * 2", "kept.append(u)"),
        ("u = u * 2", "u = u + torch.rand(2)"),
        ("return u, v", "return u, scale"),
        ("for scale in (1.0, 0.5, 0.25, 0.125)", "while True"),
        ("u = u * 2", "if u.sum() > 9:\n                break"),
    ],
)
def test_a_loop_whose_further_rounds_could_be_noticed_stays(tmp_path: Path, old: str, new: str) -> None:
    assert old in LOOP
    assert proposals(tmp_path, LOOP.replace(old, new), edits_of_functions.where_for_break) == []


CALLS = """
    import torch
    class Net(torch.nn.Linear):
        def forward(self, x, how=None):
            return x if how is None else super().forward(x)
    @torch.compile(backend=count)
    def f(x, how=None):
        return x + 1 if how is None else x * 2
    model = Net(2, 2)
    run = torch.compile(model, backend=count)
"""


@pytest.mark.parametrize("function", ["f", "forward"])
def test_each_kind_of_call_gets_a_version_of_its_own(tmp_path: Path, function: str) -> None:
    """The compiled module stays one, and a kind that comes again is not compiled again."""
    changed, *_ = proposals(tmp_path, CALLS, edits_of_versions.compile_versions, "how", "", function, "optional")
    assert "lambda x, how=None: how is None, backend=count" in changed
    graphs = CountingBackend()
    exec(changed, ran := {"count": graphs})
    called = ran["f"] if function == "f" else ran["run"]
    x = torch.randn(3, 2)
    expected = x * 2 if function == "f" else torch.nn.Linear.forward(ran["model"], x)
    for _ in range(2):
        torch.testing.assert_close(called(x, how="any"), expected)
        torch.testing.assert_close(called(x), x + 1 if function == "f" else x)
    assert graphs.frame_count == 2 if function == "f" else graphs.frame_count == 1  # a graph without operations
    assert isinstance(ran["run"], torch.nn.Module)


ATTRIBUTES = "tuple(v for m in model.modules() for v in vars(m).values() if isinstance(v, (bool, int, float, str)))"


@pytest.mark.parametrize(
    ("subject", "cause", "keys"),
    [
        ("x", "dtype", ["x.dtype"]),
        ("x, dim 1", "stride", ["x.stride()"]),
        ("how", "value", ["how"]),
        ("how", "length", ["len(how)", "tuple(how)", "tuple(how.items())"]),
        (
            "the grad mode or another global setting",
            "grad",
            ["(torch.is_grad_enabled(), *(torch.is_autocast_enabled(kind) for kind in ('cpu', 'cuda')))"],
        ),
        ("self.weight", "grad", ["tuple(p.requires_grad for p in model.parameters())"]),
        ("self.drop.training", "mode", ["tuple(m.training for m in model.modules())"]),
        ("self.act.name", "attribute", ["model.act.name", ATTRIBUTES]),
        ("fn.0.scaling", "attribute", ["model[0].scaling", ATTRIBUTES]),
        ("self.frames", "length", ["len(model.frames)"]),
        ("x, dim 1", "small", ["x.shape[1] < 2", "x.shape"]),
        ("how.__code__", "identity", ["how"]),  # a builtin function has no code
        ("self.scale", "counter", []),
        ("other", "value", []),
    ],
)
def test_what_tells_calls_apart(tmp_path: Path, subject: str, cause: str, keys: list[str]) -> None:
    found = proposals(tmp_path, CALLS, edits_of_versions.compile_versions, subject, "", "forward", cause)
    assert len(found) == len(keys)
    for text, key in zip(found, keys, strict=True):
        assert f"lambda x, how=None: {key}, backend=count)(model)" in text


def test_a_module_without_a_name_gets_one(tmp_path: Path) -> None:
    source = CALLS.replace("torch.compile(model, backend=count)", "torch.compile(Net(2, 2), backend=count)")
    source += "    run(torch.ones(1, 2))\n"
    found, every = proposals(
        tmp_path, source, edits_of_versions.compile_versions, "self.bias", "", "forward", "attribute"
    )
    assert "module.modules()" in every
    assert "compile_each(lambda x, how=None: module.bias, backend=count)(module := Net(2, 2))" in found
    exec(found, {"count": "eager"})
    (found,) = proposals(tmp_path, source, edits_of_versions.compile_versions, "how", "", "forward", "optional")
    assert "compile_each(lambda x, how=None: how is None, backend=count)(Net(2, 2))" in found


def test_a_second_value_refines_the_kinds(tmp_path: Path) -> None:
    editor = edits_of_versions.compile_versions
    source = CALLS.replace("torch.compile(model, backend=count)", "torch.compile(Net(2, 2), backend=count)")
    first, _ = proposals(tmp_path, source, editor, "self.bias", "", "forward", "attribute")
    second, *_ = proposals(tmp_path, first, editor, "fn.in_features", "", "forward", "attribute")
    assert "(lambda x, how=None: (module.bias, module.in_features), backend=count)(module := Net(2, 2))" in second
    third, *_ = proposals(tmp_path, second, editor, "how", "", "forward", "optional")
    assert "lambda x, how=None: ((module.bias, module.in_features), how is None)" in third
    assert third.count("def compile_each(") == 1


def test_a_method_is_told_apart_by_its_object(tmp_path: Path) -> None:
    source = CALLS + "    step = torch.compile(model.forward, backend=count)\n"
    subject = "fn.__self__.in_features"
    found = proposals(tmp_path, source, edits_of_versions.compile_versions, subject, "", "forward", "attribute")
    assert "lambda x, how=None: model.in_features, backend=count)(model.forward)" in found[-1]


@pytest.mark.parametrize("function", ["f", "forward"])
def test_a_kind_of_call_is_compiled_when_it_comes_again(tmp_path: Path, function: str) -> None:
    changed, *_ = proposals(tmp_path, CALLS, edits_of_versions.compile_repeated, "x, dim 0", "", function, "size")
    assert "compile_repeated(lambda x, how=None: x.shape, backend=count)" in changed
    graphs = CountingBackend()
    exec(changed, ran := {"count": graphs})
    called = ran["f"] if function == "f" else ran["run"]
    for n in (1, 2, 3, 3, 3):
        x = torch.randn(n, 2)
        expected = x * 2 if function == "f" else torch.nn.Linear.forward(ran["model"], x)
        torch.testing.assert_close(called(x, how="any"), expected)
    assert graphs.frame_count == 1
    assert isinstance(ran["run"], torch.nn.Module)


COUNTED = """
    import torch
    STEP = 0
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.every, self.calls = 3, 0
        def forward(self, x):
            global STEP
            STEP += 1
            self.calls += 1
            if self.calls % self.every == 0:  # HERE
                return x * 2
            return x + 0 if STEP > 4 else -x
    model = Net()
    run = torch.compile(model, backend=count)
"""


@pytest.mark.parametrize(
    ("subject", "cause", "key"),
    [
        ("self.calls", "counter", "(model.calls + 1) % model.every == 0"),
        ("STEP", "value", "STEP + 1 > 4"),
        ("self.every", "attribute", ""),  # the other number of the condition changes in the call
        ("x", "value", ""),
        ("self.other", "attribute", ""),
    ],
)
def test_outcomes_of_conditions_tell_calls_apart(tmp_path: Path, subject: str, cause: str, key: str) -> None:
    found = proposals(tmp_path, COUNTED, edits_of_versions.compile_outcomes, subject, "", "forward", cause)
    assert [f"compile_each(lambda x: {key}, backend=count)(model)" in text for text in found] == [True] * bool(key)


@pytest.mark.parametrize(
    "change",
    [
        ("self.calls += 1", "self.calls += int(x.sum())"),
        ("self.calls += 1", "self.calls = self.calls + 1"),
        ("self.calls += 1", "if STEP: self.calls += 1"),
        ("self.calls % self.every == 0", "self.calls % len(x) == 0"),
    ],
)
def test_a_condition_that_is_not_known_before_the_call_tells_nothing(tmp_path: Path, change: tuple[str, str]) -> None:
    source = COUNTED.replace(*change)
    assert proposals(tmp_path, source, edits_of_versions.compile_outcomes, "self.calls", "", "forward", "counter") == []


def test_a_version_for_each_outcome_serves_all_numbers(tmp_path: Path) -> None:
    source = COUNTED.replace("            global STEP\n            STEP += 1\n", "").replace("STEP > 4", "self.every")
    (found,) = proposals(
        tmp_path,
        source,
        edits.together(edits.add_dynamic_source("dynamic_sources"), edits_of_versions.compile_outcomes),
        "self.calls",
        "",
        "forward",
        "counter",
    )
    graphs = CountingBackend()
    with torch.compiler.config.patch(dynamic_sources=""):
        exec(found, ran := {"count": graphs})
        got = [int(ran["run"](torch.ones(()))) for _ in range(9)]
    assert got == [1, 1, 2, 1, 1, 2, 1, 1, 2]
    assert graphs.frame_count == 2


def test_options_of_the_compiler_are_kept(tmp_path: Path) -> None:
    source = CALLS.replace("torch.compile(model, backend=count)", "torch.compile(model, dynamic=False, **more)")
    (found,) = proposals(tmp_path, source, edits_of_versions.compile_versions, "how", "", "forward", "value")
    assert "compile_each(lambda x, how=None: how, dynamic=False, **more)(model)" in found


def test_a_compiled_function_gets_contiguous_tensors(tmp_path: Path) -> None:
    source = CALLS.replace("return x if how is None", "assert x.is_contiguous()\n            return x if how is None")
    decorated, called = proposals(tmp_path, source, edits_of_calls.wrap_contiguous, "x", "", "f", "stride")
    assert "@contiguous_arguments\n@torch.compile(backend=count)\ndef f" in decorated
    exec(called, ran := {"count": "eager"})
    x = torch.randn(2, 2).t()
    torch.testing.assert_close(ran["run"](x, how=1), torch.nn.Linear.forward(ran["model"], x))
    assert isinstance(ran["run"], torch.nn.Module)


@pytest.mark.parametrize(
    ("editor", "cause"),
    [
        (edits_of_calls.wrap_contiguous, "stride"),
        (edits_of_calls.wrap_first_call, "length"),
        (edits_of_versions.compile_versions, "optional"),
    ],
)
def test_a_wrapped_function_keeps_its_name(tmp_path: Path, editor: Editor, cause: str) -> None:
    source = CALLS.replace("def f(x, how=None):", 'def f(x, how=None):\n        """Doc of f."""')
    changed, *_ = proposals(tmp_path, source, editor, "how", "", "f", cause)
    exec(changed, ran := {"count": "eager", "__name__": "program"})
    f = ran["f"]
    assert (f.__name__, f.__qualname__, f.__doc__, f.__module__) == ("f", "f", "Doc of f.", "program")


def test_the_first_call_runs_uncompiled(tmp_path: Path) -> None:
    source = """
        import torch
        CACHE = {}
        @torch.compile(backend=count)
        def f(x):
            if "mask" not in CACHE:
                CACHE["mask"] = torch.ones(2)
            return x + CACHE["mask"]
    """
    (changed,) = proposals(tmp_path, source, edits_of_calls.wrap_first_call, "CACHE", "", "f", "length")
    graphs = CountingBackend()
    exec(changed, ran := {"count": graphs})
    for _ in range(3):
        torch.testing.assert_close(ran["f"](torch.zeros(2)), torch.ones(2))
    assert graphs.frame_count == 1


def test_functions_of_math_become_those_of_torch(tmp_path: Path) -> None:
    source = "import math\nimport torch\ndef f(x):\n    return x / math.sqrt(x.var()) + math.pi * math.erf(1)  # HERE\n"
    (changed,) = proposals(tmp_path, source, edits_of_values.keep_tensor)
    assert "x / torch.sqrt(x.var()) + math.pi * math.erf(1)" in changed


def test_values_are_joined_by_functions_of_torch(tmp_path: Path) -> None:
    source = "def f(x, low):\n    return (x >= low).all() and not (x == 3).any() or x[0] > 9  # HERE\n"
    (changed,) = proposals(tmp_path, source, edits_of_values.join_values)
    exec(changed, ran := {})
    exec(source.replace("import torch\n", ""), plain := {})
    for values in ([1.0, 2.0], [3.0, 2.0], [-1.0, 2.0], [10.0, 3.0]):
        x = torch.tensor(values)
        assert bool(ran["f"](x, 0.0)) == bool(plain["f"](x, 0.0))
    assert torch.compile(ran["f"], backend="eager", fullgraph=True)(torch.tensor([1.0, 2.0]), 0.0)


@pytest.mark.parametrize("line", ["if a and b:\n        pass", "return a & b", "x = (a, b)"])
def test_only_values_are_joined(tmp_path: Path, line: str) -> None:
    source = f"def f(a, b):\n    {line}  # HERE\n"
    assert not proposals(tmp_path, source, edits_of_values.join_values)


@pytest.mark.parametrize(
    ("body", "kept", "refusing"),
    [
        (
            "if m is not None and (m == 0).any():  # HERE\n        return m\n    return None",
            "if m is not None:  # HERE\n        return m\n    return None",
            "if m is not None:\n        if (m == 0).any():\n            return m\n        raise",
        ),
        (
            "if (m == 0).any():  # HERE\n        return m",
            "    return m",
            "if True:\n        if (m == 0).any():\n            return m\n        raise",
        ),
        (
            "if m is not None and (m.all() or\n            m.any()) and m.max():  # HERE\n        return m",
            "if m is not None:  # HERE",
            "if m is not None:\n        if (m.all() or\n            m.any()) and m.max():\n            return m",
        ),
        (
            "if not m.any():  # HERE\n        m = None\n    return m",
            "    pass\n    return m",
            "if not m.any():  # HERE\n        raise AssertionError",
        ),
    ],
)
def test_a_value_is_kept_where_the_program_may_leave_it_out(
    tmp_path: Path, body: str, kept: str, refusing: str
) -> None:
    source = f"def f(m):\n    {body}\n"
    (changed,) = proposals(tmp_path, source, edits_of_shortcuts.keep_value)
    assert kept in changed
    (changed,) = proposals(tmp_path, source, edits_of_shortcuts.refuse_without_value)
    assert refusing in changed


@pytest.mark.parametrize(
    "body",
    [
        "if m.any():  # HERE\n        return m\n    return m + 1",
        "if m.any():  # HERE\n        return None\n    return m",
        "if m.any():  # HERE\n        other = None\n    return m",
        "if m is not None:  # HERE\n        return m",
        "for _ in range(2):\n        if m.any():  # HERE\n            return m",
    ],
)
def test_a_value_that_is_no_shortcut_is_not_kept(tmp_path: Path, body: str) -> None:
    assert not proposals(tmp_path, f"def f(m):\n    {body}\n", edits_of_shortcuts.keep_value)


def test_functions_of_math_stay_in_the_first_proposal(tmp_path: Path) -> None:
    """The argument of such a function may be a number of Python, which a function of torch refuses."""
    source = "import math\nimport torch\ndef f(x, n):\n    return x.sum().item() * math.exp(x.max().item())  # HERE\n"
    kept, replaced = proposals(tmp_path, source, edits_of_values.keep_tensor)
    assert "return (x.sum()) * math.exp(x.max().item())" in kept
    assert "return (x.sum()) * torch.exp((x.max()))" in replaced


LATER = """
    import torch
    kept, other = [], []
    @torch.compile(backend=count, fullgraph=True)
    def f(x, local):
        local.append(x)
        kept.append(x.detach())
        torch.save(x, "x.pt")  # HERE
        y = other.append(x)
        return x + 1
    def g(x):
        torch.save(x, "x.pt")
"""


def test_a_call_that_adds_to_a_list_is_made_behind_the_compiled_part(tmp_path: Path) -> None:
    changed, _ = proposals(tmp_path, LATER, edits_of_calls.call_later, "kept", "", "f", "length")
    assert proposals(tmp_path, LATER, edits_of_calls.call_later, "local", "", "f", "length") == []
    assert proposals(tmp_path, LATER, edits_of_calls.call_later, "other", "", "f", "length") == []
    with torch._dynamo.config.patch(reorderable_logging_functions=set()):
        graphs = CountingBackend()
        rest = ("other.append(x)", 'torch.save(x, "x.pt")')
        exec(changed.replace(rest[0], "1").replace(rest[1], "pass"), ran := {"count": graphs})
        xs = [torch.randn(3) for _ in range(3)]
        for x in xs:
            ran["f"](x, [])
    assert graphs.frame_count == 1
    assert all(torch.equal(kept, x) for kept, x in zip(ran["kept"], xs, strict=True))


def test_a_file_is_written_behind_the_compiled_part(tmp_path: Path) -> None:
    changed, _ = proposals(tmp_path, LATER, edits_of_calls.call_later, "torch.save", "", "f", "object")
    assert "    torch_save_later(x)  # HERE" in changed
    assert 'def torch_save_later(x):\n    torch.save(x, "x.pt")\n' in changed
    assert "reorderable_logging_functions.add(torch_save_later)" in changed


KEPT = """
    import torch
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.notes = []
        def forward(self, x):
            y = x.exp()
            self.notes.append(f"{y.sum():.1f}")  # HERE
            return y
    net = torch.compile(Net(), backend=count, fullgraph=True)
    for n in (1.0, 2.0, 3.0):
        net(torch.full((1,), n))
"""


def moved_of_self(folder: Path, source: str) -> list[str]:
    """The program after each alternative of a call of ``self`` that is moved; its last line calls the module."""
    text = textwrap.dedent(source).lstrip()
    (folder / "program.py").write_text(text)
    line = next(n for n, row in enumerate(text.splitlines(), 1) if "# HERE" in row)
    frame = "program.py", max(n for n, row in enumerate(text.splitlines()[:line], 1) if "def forward" in row)
    found = Case(folder, "program.py", "program.py", line, "forward", "self.notes", "", frames=(frame,), cause="length")
    changed = (apply_edits({}, folder, edits) for edits in edits_of_calls.call_later(found))
    return [each["program.py"] for each in changed if each]


@pytest.mark.parametrize("named", [True, False])
def test_a_call_of_an_attribute_is_moved_where_one_object_has_it(tmp_path: Path, named: bool) -> None:
    with_name = KEPT.replace("net = torch.compile(Net(),", "model = Net()\n    net = torch.compile(model,")
    source = with_name if named else KEPT
    changed, *_ = moved_of_self(tmp_path, source)
    name = "model" if named else "module"
    assert f"{name}.notes.append(f'{{y.sum():.1f}}')" in changed
    graphs = CountingBackend()
    with torch._dynamo.config.patch(reorderable_logging_functions=set()):
        exec(changed, ran := {"count": graphs})
    assert (ran[name].notes, graphs.frame_count) == (["2.7", "7.4", "20.1"], 1)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("net = torch", "other = Net()\n    net = torch"),
        ("net = torch", "net = [torch"),
        ("    for n in", "    net = copy.deepcopy(net)\n    for n in"),
        ("    net = torch", "    class Other(Net): ...\n    net = torch"),
        ("return y", "return y * len(self.notes)"),
        ("self.notes.append", "self.forward"),
        ("net = torch.compile(Net(), backend=count, fullgraph=True)", "net = (lambda: torch.compile(Net()))()"),
    ],
)
def test_a_call_of_self_stays_where_another_object_may_have_it(tmp_path: Path, old: str, new: str) -> None:
    assert old in KEPT
    text = KEPT.replace(old, new, 1)
    text = text.replace("fullgraph=True)", "fullgraph=True)][0]", 1) if "[torch" in new else text
    moved = moved_of_self(tmp_path, text)
    assert bool(moved) == ("[torch" in new)


def test_a_call_stays_where_another_function_was_compiled_around_it(tmp_path: Path) -> None:
    """Torch loses what it should move out of a function that the compiled one calls, as it calls a hook."""
    (tmp_path / "program.py").write_text(textwrap.dedent(HOOK).lstrip())
    inner, outer = ("program.py", 4), ("program.py", 99)
    for frames, moved in (((inner,), 1), ((inner, outer), 0), ((outer,), 0), ((), 0)):
        case = Case(tmp_path, "program.py", "program.py", 5, "hook", "", "", frames=frames, cause="item")
        found = [apply_edits({}, tmp_path, edit) for edit in edits_of_calls.call_later(case)]
        assert bool(found) == bool(moved)
        # The variable of the enclosing function is no variable of the module level.
        assert all("append_later(name, output)" in text["program.py"] for text in found[:1] if text)


HOOK = """
    import torch
    norms = {}
    def watch(name):
        def hook(module, inputs, output):
            norms.setdefault(name, []).append(output.norm().item())
        return hook
"""


def test_a_number_that_varies_is_moved_as_a_tensor(tmp_path: Path) -> None:
    """Torch 2.13 moves no call whose argument is a number that varies from call to call."""
    source = """
        import torch
        rows = []
        def note(*row):
            rows.append(row)
        @torch.compile(backend=count, fullgraph=True)
        def f(x, n):
            note(x.sum().item(), n)  # HERE
            return x + 1
    """
    plain, numbered, _ = proposals(tmp_path, source, edits_of_calls.call_later, "note", "", "f", "item")
    assert "note_later(n, x)" in plain
    with torch._dynamo.config.patch(reorderable_logging_functions=set()):
        graphs = CountingBackend()
        exec(numbered, ran := {"count": graphs})
        given = [0, 1, 2, 3, 0.1, 0.2, 0.3]
        for n in given:
            ran["f"](torch.ones(2), n)
    assert ran["rows"] == [(2.0, n) for n in given]
    assert [type(n) for _, n in ran["rows"]] == [type(n) for n in given]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('torch.save(x, "x.pt")  # HERE', 'with torch.no_grad():\n            torch.save(x, "x.pt")  # HERE'),
        (
            'torch.save(x, "x.pt")  # HERE',
            'try:\n            torch.save(x, "x.pt")  # HERE\n        except OSError:\n            x = -x',
        ),
        ("return x + 1", "x.add_(1)\n        return x"),
        ("return x + 1", "x[0] = 1\n        return x"),
    ],
)
def test_a_call_that_would_see_another_state_is_not_moved(tmp_path: Path, old: str, new: str) -> None:
    assert old in LATER
    source = LATER.replace(old, new, 1)
    assert proposals(tmp_path, source, edits_of_calls.call_later, "torch.save", "", "f", "object") == []


def test_a_call_in_an_inner_function_is_not_moved(tmp_path: Path) -> None:
    """Torch 2.13 makes no call that it would have to move out of a function which the compiled one calls."""
    inner = LATER.replace("  # HERE", "").replace('(x, "x.pt")\n"""', '(x, "x.pt")  # HERE')
    inner = inner.rstrip() + "  # HERE\n"
    warn = edits_of_calls.in_outermost_function(edits.add_setting("warn = 1"))
    assert proposals(tmp_path, inner, edits_of_calls.call_later, "torch.save", "", "g", "object") == []
    assert (proposals(tmp_path, inner, warn), len(proposals(tmp_path, LATER, warn))) == ([], 1)


@pytest.mark.parametrize(
    ("caller", "moved"),
    [
        ("@torch.compile\ndef outer(x):\n    return f(x, [])\n", False),
        ("def outer(x):\n    return f(x, [])\nouter = torch.compile(outer)\n", False),
        ("def inner(x):\n    return f(x, [])\n@torch.compile\ndef outer(x):\n    return inner(x)\n", False),
        ("class Net(torch.nn.Module):\n    def forward(self, x):\n        return f(x, [])\n", False),
        ("def main():\n    f(torch.ones(2), [])\nmain()\n", True),
    ],
)
@pytest.mark.parametrize(("subject", "cause"), [("torch.save", "object"), ("kept", "length")])
def test_a_compiled_function_that_another_one_calls_is_not_outermost(
    tmp_path: Path, caller: str, moved: bool, subject: str, cause: str
) -> None:
    """Torch makes it a part of the other one, and then loses what it should move."""
    source = textwrap.dedent(LATER) + caller
    assert bool(proposals(tmp_path, source, edits_of_calls.call_later, subject, "", "f", cause)) == moved


@pytest.mark.parametrize(("mark", "moved"), [("@torch.compile\n", False), ("", True)])
def test_a_frame_in_another_compiled_function_shows_that_it_calls(tmp_path: Path, mark: str, moved: bool) -> None:
    source = textwrap.dedent(LATER).lstrip() + mark + 'def outer(x):\n    return globals()["f"](x, [])\n'
    (tmp_path / "program.py").write_text(source)
    line = next(n for n, t in enumerate(source.splitlines(), 1) if "# HERE" in t)
    callers = (("program.py", len(source.splitlines())),)
    case = Case(tmp_path, "program.py", "program.py", line, "f", "torch.save", "", callers=callers, cause="object")
    assert bool(list(edits_of_calls.call_later(case))) == moved


def test_a_draw_becomes_an_op_that_runs_in_each_call(tmp_path: Path) -> None:
    """Equal draws stay apart and in their order, and compiling draws no number."""
    source = """
        import random
        import torch
        @torch.compile(backend="aot_eager", fullgraph=True)
        def f(x):
            if random.random() < 0.5:  # HERE
                x = -x
            return x
    """
    plain, number, picked = proposals(tmp_path, source, edits_of_draws.draw_as_op)
    assert "if random_random_op(CALLS_OF_OPS).item() < 0.5:  # HERE" in number
    assert "capture_scalar_outputs = True" in number
    assert "if random_random_op(CALLS_OF_OPS) < 0.5:  # HERE" in plain
    twice = picked.replace("return x\n", "return x * random_random_op(CALLS_OF_OPS)\n")
    assert twice != picked
    exec(twice, ran := {})
    random.seed(0)
    got = [float(ran["f"](torch.ones(()))) for _ in range(4)]
    random.seed(0)
    wanted = [(-1 if random.random() < 0.5 else 1) * random.random() for _ in range(4)]
    assert got == pytest.approx(wanted)
    assert int(ran["CALLS_OF_OPS"]) == 8


@pytest.mark.parametrize(
    "drawn",
    [
        "y = x if self.training and random.random() < 0.5 else -x",
        "y = [random.random() for _ in x]",
        "y = random.uniform(0, x)",
        "y = np.random.rand(3)",
        "y = np.random.normal(0, 1, 3)",
        "y = np.random.uniform(size=3)",
        "y = random.random() + random.random()",
        "y = random.choice('ab')",
        "y = np.random.random(5)",
        "y = np.random.exponential(1.0, 5)",
        "y = np.random.uniform([0, 1])",
        "y = np.random.uniform([0, 1], [2, 3])",
        "y = random.getrandbits(64)",
        "y = random.randint(0, 9223372036854775808)",
    ],
)
def test_draws_that_may_not_happen_once_or_are_no_number_stay(tmp_path: Path, drawn: str) -> None:
    source = f"import torch\ndef f(self, x):\n    {drawn}  # HERE\n    return y\n"
    assert proposals(tmp_path, source, edits_of_draws.draw_as_op) == []


@pytest.mark.parametrize(
    ("drawn", "dtype"),
    [
        ("random.uniform(-1, b=2.5)", "float64"),
        ("np.random.exponential(1.0)", "float64"),
        ("np.random.normal(0, 1)", "float64"),
        ("random.getrandbits(63)", "int64"),
        ("random.randint(-5, 5)", "int64"),
    ],
)
def test_draws_of_one_number_become_ops(tmp_path: Path, drawn: str, dtype: str) -> None:
    source = f"import torch\ndef f(x):\n    return x + {drawn}  # HERE\n"
    plain, *_ = proposals(tmp_path, source, edits_of_draws.draw_as_op)
    assert f"return torch.tensor({drawn}, dtype=torch.{dtype})" in plain


def test_a_draw_has_bounds_that_vary(tmp_path: Path) -> None:
    """The op gets what depends on sizes and attributes as numbers."""
    source = """
        import random
        import torch
        class Mask:
            width = 2
            @torch.compile(backend="aot_eager", fullgraph=True)
            def f(self, x):
                if self.width:
                    start = random.randint(0, x.shape[-1] - self.width)
                    x = x.clone()
                    x[..., start : start + self.width] = 0  # HERE
                return x
    """
    plain, number = proposals(tmp_path, source, edits_of_draws.draw_as_op)
    assert "random_randint_op(count: torch.Tensor, bound_0: int) -> torch.Tensor:" in plain
    assert "return torch.tensor(random.randint(0, bound_0), dtype=torch.int64)" in plain
    # The program sets it for its process.
    with torch._dynamo.config.patch(capture_scalar_outputs=False):
        exec(number, ran := {})
        random.seed(0)
        got = [ran["Mask"]().f(torch.ones(n)) for n in (4, 5, 9)]
    random.seed(0)
    for n, found in zip((4, 5, 9), got, strict=True):
        start = random.randint(0, n - 2)
        assert (found == 0).nonzero().flatten().tolist() == [start, start + 1]


def test_an_edited_branch_computes_the_same(tmp_path: Path) -> None:
    source = """
        import torch
        def f(x, y):
            if x.sum() > 0:  # HERE
                x = x + 1
                y = x * y
            else:
                y = y - 1
            return x * y
    """
    (changed,) = proposals(tmp_path, source, edits_of_values.cond_for_branch)
    assert "torch.cond(x.sum() > 0, if_true, if_false, (x, y))" in changed
    assert "return (x.clone(), y)" in changed


def test_what_only_one_side_needs_stays_inside(tmp_path: Path) -> None:
    source = """
        import torch
        def f(q, d):
            if d.max().item() > 3:  # HERE
                weight = torch.exp(-d)
                q = q * weight
            else:
                q = q + 1
            return q
    """
    (changed,) = proposals(tmp_path, source, edits_of_values.cond_for_branch)
    assert "(q,) = torch.cond(d.max() > 3, if_true, if_false, (q,))" in changed


def test_a_loop_becomes_an_operator(tmp_path: Path) -> None:
    source = """
        import torch
        def f(x):
            n = x.sum()
            while n < 50:  # HERE
                x = x * 2
                n = x.sum()
            return x
    """
    (changed,) = proposals(tmp_path, source, edits_of_values.loop_as_operator)
    assert "(n, x) = while_loop(goes_on, step, (n, x))" in changed or "while_loop(goes_on, step, (x, n))" in changed
    assert "while n" not in changed


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        ("assert (x > 0).all(), f'bad {x}'  # HERE", "torch._assert_async((x > 0).all(), 'bad')"),
        ("if not x.all():  # HERE\n    raise ValueError('no')", "torch._assert_async(x.all(), 'no')"),
        ("if x.any():  # HERE\n    raise ValueError('no')", "torch._assert_async(~x.any(), 'no')"),
    ],
)
def test_a_check_in_the_graph(tmp_path: Path, check: str, expected: str) -> None:
    source = "import torch\ndef f(x):\n" + textwrap.indent(check, "    ") + "\n    return x\n"
    (changed,) = proposals(tmp_path, source, edits_of_values.assert_on_device)
    assert expected in changed


@pytest.mark.parametrize(
    ("side", "made", "proposed"),
    [
        ("self.drop(x) + x", "torch.nn.Dropout(0.5)", 0),
        ("self.drop(x)", "torch.nn.BatchNorm1d(3)", 0),
        ("self.drop(x)", "torch.nn.Linear(3, 3)", 1),
        ("x.relu() + len(x)", "torch.nn.Dropout(0.5)", 1),
    ],
)
def test_no_side_is_computed_always_that_draws_or_keeps_statistics(
    tmp_path: Path, side: str, made: str, proposed: int
) -> None:
    source = f"""
        import torch
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.drop = {made}
            def forward(self, x):
                if x.sum() > 0:  # HERE
                    return x * 2
                return {side}
    """
    assert len(proposals(tmp_path, source, edits_of_values.where_for_branch)) == proposed


@pytest.mark.parametrize(("more", "proposed"), [("", 1), ("f(x).sum().backward()", 0), ("x.requires_grad_()", 0)])
def test_no_loop_of_torch_takes_gradients(tmp_path: Path, more: str, proposed: int) -> None:
    source = f"import torch\ndef f(x):\n    while x.sum() > 1:  # HERE\n        x = x * 0.5\n    return x\n{more}\n"
    assert len(proposals(tmp_path, source, edits_of_values.loop_as_operator)) == proposed


@pytest.mark.parametrize(
    ("handler", "proposed"),
    [
        ("try:\n    f(1)\nexcept ValueError:\n    pass", 0),
        ("try:\n    f(1)\nexcept Exception as e:\n    print(type(e))", 0),
        ("try:\n    f(1)\nexcept:\n    pass", 0),
        ("try:\n    f(1)\nexcept (KeyError, RuntimeError):\n    pass", 0),
        ("try:\n    f(1)\nexcept library.Failed:\n    pass", 0),
        ("with contextlib.suppress(ValueError):\n    f(1)", 0),
        ("with pytest.raises(ValueError):\n    f(1)", 0),
        ("try:\n    import numpy\nexcept ImportError:\n    numpy = None", 1),
    ],
)
def test_a_check_whose_exception_may_be_caught_stays(tmp_path: Path, handler: str, proposed: int) -> None:
    """In the graph it raises RuntimeError, which another handler catches, or none."""
    source = (
        f"import torch\ndef f(x):\n    if x.any():  # HERE\n        raise ValueError('no')\n    return x\n{handler}\n"
    )
    assert len(proposals(tmp_path, source, edits_of_values.assert_on_device)) == proposed
    if "ValueError" in handler:
        other = source.replace("ValueError('no')", "Custom('no')")
        assert proposals(tmp_path, other, edits_of_values.assert_on_device) == []


def test_a_number_stays_a_tensor_in_arithmetic_alone(tmp_path: Path) -> None:
    editor = edits_of_values.keep_tensor
    (changed,) = proposals(tmp_path, "import torch\ndef f(x):\n    return x * x.sum().item()  # HERE\n", editor)
    assert "return x * (x.sum())" in changed
    assert proposals(tmp_path, "import torch\ndef f(x):\n    seen.append(x.item())  # HERE\n", editor) == []


def test_only_the_programs_own_marker_is_dropped(tmp_path: Path) -> None:
    own = """
        import torch
        @torch.compiler.disable(recursive=False)
        def helper(x):
            return x
        def f(x):
            return helper(x)  # HERE
    """
    words = "Skip calling function `<function helper at 0x7f>`"
    (changed,) = proposals(tmp_path, own, edits.drop_marker, "helper", words)
    assert "disable" not in changed
    foreign = "import torch\nfrom library import helper\ndef f(x):\n    return helper(x)  # HERE\n"
    assert proposals(tmp_path, foreign, edits.drop_marker, "helper", words) == []


def test_a_class_moves_out_of_a_method(tmp_path: Path) -> None:
    source = """
        import torch
        class Stage:
            def f(self, x):
                class Pre(torch.autograd.Function):  # HERE
                    pass
                return Pre.apply(x)
    """
    (changed,) = proposals(tmp_path, source, edits.hoist_class)
    assert "\nclass Pre(torch.autograd.Function):  # HERE\n    pass\n\n\nclass Stage:" in changed


def test_keywords_of_apply_follow_the_order_of_forward(tmp_path: Path) -> None:
    source = """
        import torch
        class Scale(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, *, a, b):
                return x * a + b
        def f(x):
            return Scale.apply(x, b=1, a=2)  # HERE
    """
    (changed,) = proposals(tmp_path, source, edits_of_calls.pass_by_position)
    assert "Scale.apply(x, 2, 1)" in changed
    assert "forward(ctx, x, a, b)" in changed


def test_an_opaque_expression_becomes_an_op(tmp_path: Path) -> None:
    source = """
        import torch
        def f(x):
            y = torch.from_numpy(medfilt(x.numpy()))  # HERE
            return y
    """
    same, scalar = proposals(tmp_path, source, edits_of_values.declare_expression, "medfilt")
    assert 'def medfilt_op(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:' in same
    assert 'def medfilt_op(x: Float[Tensor, "*s"]) -> Float[Tensor, ""]:' in scalar
    assert "y = medfilt_op(x)  # HERE" in same
    second = proposals(tmp_path, same, edits_of_values.declare_expression, "medfilt")[0]
    assert "y = medfilt__op(" in second
    assert "program::medfilt__of_program" in second


def test_an_op_stands_below_the_imports_that_it_needs(tmp_path: Path) -> None:
    source = "import torch\ndef f(x):\n    return sort(x)  # HERE\n"
    same, _ = proposals(tmp_path, source, edits_of_values.declare_expression, "sort")
    assert same.index("import shiplap as sl") < same.index("@sl.op") < same.index("def f(x)")


def test_effects_and_clocks_in_eager_mode(tmp_path: Path) -> None:
    (effect,) = proposals(tmp_path, "import torch\ndef f(x):\n    log(x)  # HERE\n", edits.guard_effect)
    assert "    if not torch.compiler.is_compiling():\n        log(x)  # HERE\n" in effect
    assert proposals(tmp_path, "import torch\ndef f(x):\n    y = log(x)  # HERE\n", edits.guard_effect) == []


CLOCKS = """
    import time, torch
    def f(x, spent):
        t = time.time()  # HERE
        {}
        return x
"""


@pytest.mark.parametrize(
    ("rest", "count"),
    [
        ("print(time.time() - t)", 1),
        ("print(f'{round(time.time() - t, 2)} s', flush=True)", 1),
        ("print(x, time.time() - t)", 0),  # x would not be printed
        ("end = time.time()\n        print(end - t)", 2),
        ("spent.append(time.time() - t)", 0),  # the list would hold zeros
        ("x.started = t", 0),  # a reading leaves the function
        ("spent.append(time.time() - x.started)", 0),  # the difference of 0 and a time is no time
        ("spent.append(time.time())", 0),
        ("end = time.time(); spent.append(end - t)", 0),
    ],
)
def test_a_function_reads_all_its_clocks_or_none(tmp_path: Path, rest: str, count: int) -> None:
    source = CLOCKS.format(rest)
    found = proposals(tmp_path, source, edits_of_calls.guard_clock, "time.time")
    assert [text.count("(0.0 if torch.compiler.is_compiling() else time.time())") for text in found] == [count] * (
        count > 0
    )
    # A print of 0.0 would be no time.
    shown = rest.rpartition("\n        ")[2]
    assert all(f"if not torch.compiler.is_compiling():\n        {shown}" in text for text in found)
    later = source.replace("t = time.time()  # HERE", "t = time.time()").replace(rest, f"{rest}  # HERE")
    # What is called later measures what lies between as well.
    assert proposals(tmp_path, later, edits_of_calls.call_later, "time.time", "", "f", "system") == []


def test_columns_are_counted_in_bytes(tmp_path: Path) -> None:
    source = "import torch\ndef f(ä):\n    return 'é', ä if ä.all() else -ä  # HERE\n"
    (changed,) = proposals(tmp_path, source, edits_of_values.where_for_branch)
    assert "return 'é', torch.where(ä.all(), ä, -ä)  # HERE" in changed


def test_a_helper_that_logs_is_called_in_eager_mode_only(tmp_path: Path) -> None:
    source = """
    import torch
    def log_once(text):
        if not hasattr(log, "said"):  # HERE
            log.said = text
    def f(x):
        log_once("x")
        return scaled(x)
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(source).lstrip())
    lines = (("program.py", 6), ("program.py", 7))  # the call whose result is returned stays
    case = Case(tmp_path, "program.py", "program.py", 3, "log_once", "hasattr", "", callers=lines)
    (edit,) = edits.guard_caller(case)
    changed = apply_edits({}, tmp_path, edit)
    assert changed is not None
    assert '    if not torch.compiler.is_compiling():\n        log_once("x")\n    return' in changed["program.py"]
