"""Programs that nobody here wrote: every break is named, with the line of their source that breaks the graph.

Lines are pinned by their text, which a reader can check against the package; packages are pinned in constraints.txt.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from shiplap.doctor import Diagnosis, diagnose_command
from tests.doctor.programs import lines

# Most of their time is what they import. Programs of ours: tests/doctor/test_cli.py, test_examine.py, test_causes.py.
pytestmark = [pytest.mark.slow, pytest.mark.long]
REAL = Path(__file__).with_name("real")
NEEDS = {"ode": "torchdiffeq", "graphs": "torch_geometric", "transformers_models": "transformers", "matching": "scipy"}

_MISC, _RK = "torchdiffeq/_impl/misc.py", "torchdiffeq/_impl/rk_common.py"
EXPECTED = {
    "ode": {
        (_MISC, "if d0 < 1e-5 or d1 < 1e-5:", "branch"),
        (_MISC, "if d1 <= 1e-15 and d2 <= 1e-15:", "branch"),
        (_MISC, "if error_ratio == 0:", "branch"),
        (_MISC, "if error_ratio < 1:", "branch"),
        (_MISC, "assert (t[1:] > t[:-1]).all(), '{} must be strictly increasing or decreasing'.format(name)", "branch"),
        (_MISC, "if len(t) > 1 and t[0] > t[1]:", "branch"),
        (
            _MISC,
            "assert diff.all() or (~diff).all(), '{} must be strictly increasing or decreasing'.format(name)",
            "branch",
        ),
        (_RK, "if alpha_i == 1.:", "branch"),
        (_RK, "if (counts > 1).any():", "branch"),
        (_RK, "self.next_step_index = min(bisect.bisect(self.step_t.tolist(), t[0]), len(self.step_t) - 1)", "item"),
        (_RK, "self.next_step_index = min(bisect.bisect(self.step_t.tolist(), t[0]), len(self.step_t) - 1)", "foreign"),
        (_RK, "self.next_jump_index = min(bisect.bisect(self.jump_t.tolist(), t[0]), len(self.jump_t) - 1)", "item"),
        (_RK, "self.next_jump_index = min(bisect.bisect(self.jump_t.tolist(), t[0]), len(self.jump_t) - 1)", "foreign"),
        (_RK, "while next_t > self.rk_state.t1:", "branch"),
        (
            _RK,
            "assert n_steps < self.max_num_steps, 'max_num_steps exceeded ({}>={})'.format(n_steps, "
            "self.max_num_steps)",
            "branch",
        ),
        (_RK, "if not torch.isfinite(dt):", "branch"),
        (_RK, "assert t0 + dt > t0, 'underflow in dt {}'.format(dt.item())", "branch"),
        (_RK, "assert torch.isfinite(y0).all(), 'non-finite values in state `y`: {}'.format(y0)", "branch"),
        (_RK, "if dt > self.max_step:", "branch"),
        (_RK, "if dt <= self.min_step:", "branch"),
        (_RK, "if accept_step:", "branch"),
        (
            "torchdiffeq/_impl/interp.py",
            "assert (t0 <= t) & (t <= t1), 'invalid interpolation, fails `t0 <= t <= t1`: "
            "{}, {}, {}'.format(t0, t, t1)",
            "branch",
        ),
        ("torchdiffeq/_impl/odeint.py", "solution = solver.integrate(t)", "object"),
    },
    "graphs": {
        ("torch_geometric/utils/_scatter.py", "dim_size = int(index.max()) + 1 if index.numel() > 0 else 0", "item"),
        ("torch_geometric/utils/loop.py", "edge_index = edge_index[:, mask]", "shape"),
        ("torch_geometric/nn/pool/connect/filter_edges.py", "row, col = row[mask], col[mask]", "shape"),
        ("torch_geometric/nn/pool/select/topk.py", "return x_perm[batch_perm[mask]]", "shape"),
    },
    "matching": {
        ("matching.py", "rows, columns = linear_sum_assignment(cost.numpy())", "foreign"),
        ("matching.py", "tree = cKDTree(points.numpy())", "object"),
        ("matching.py", "_, nearest = tree.query(points.numpy(), k=2)", "object"),
    },
    "transformers_models": {
        (
            "transformers/models/longformer/modeling_longformer.py",
            "is_global_attn = is_index_global_attn.flatten().any().item()",
            "item",
        ),
        ("transformers/models/wav2vec2/modeling_wav2vec2.py", "hidden_states.requires_grad = True", "autograd"),
        ("transformers/models/wav2vec2/modeling_wav2vec2.py", "epsilon = np.random.rand(1).item()", "system"),
        ("transformers/models/wav2vec2/modeling_wav2vec2.py", "spec_aug_mask_idx = np.random.choice(", "system"),
        ("transformers/models/wav2vec2/modeling_wav2vec2.py", "if not skip_the_layer or synced_gpus:", "branch"),
        ("transformers/utils/output_capturing.py", "recordable_keys = {", "generator"),
    },
}


@dataclass(frozen=True)
class Run:
    """What the doctor said of one program, and what torch logged about graph breaks by itself in the same run."""

    name: str
    diagnosis: Diagnosis
    log: str


@pytest.fixture(scope="module", params=EXPECTED)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    name: str = request.param
    if find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs {NEEDS[name]}: pip install 'shiplap-testing[all]'")
    log = tmp_path_factory.mktemp("real") / "graph_breaks.log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_LOGS", "graph_breaks")
        patch.setenv("TORCH_LOGS_OUT", str(log))
        diagnosis = diagnose_command([sys.executable, str(REAL / f"{name}.py")])
    return Run(name, diagnosis, log.read_text())


def test_every_break_is_named_with_its_line(run: Run) -> None:
    assert run.diagnosis.exit_code == 0
    assert lines(run.diagnosis) == EXPECTED[run.name]


def test_each_leads_back_to_the_line_of_the_script(run: Run) -> None:
    for b in run.diagnosis.breaks:
        assert Path(b.user.file).stem == run.name
        script = Path(b.user.file).read_text().splitlines()
        assert script[b.user.line - 1].strip() == b.user.code
        assert b.chain[-1] == b.place
        assert not any(p.package in ("torch", "python") for p in b.chain)
        assert b.registry.startswith("GB")


def test_torchs_own_log_names_the_same_lines(run: Run) -> None:
    """The trace and ``TORCH_LOGS`` are two ways out of the compiler; the doctor reads the first only."""
    logged = set(re.findall(r"user code at (\S+:\d+)", run.log))
    named = {str(b.place) for b in run.diagnosis.breaks}
    outside = {at for at in logged if "/site-packages/torch/" not in at}
    assert outside <= named
    assert len(named - outside) <= len(logged - outside)  # inside torch: the log names torch's line, we name the caller
