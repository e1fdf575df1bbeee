"""All checks of an audit of an installed package, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shiplap.audit.installed import checks, gradients
from shiplap.audit.installed.checks import Make

# The names are part of stored results and baselines.
BY_NAME: dict[str, Callable[[Any, Make], str]] = {
    "repeat": checks.check_repeat,
    "uninitialized": checks.check_uninitialized,
    "mutation": checks.check_mutation,
    "alias": checks.check_alias,
    "layout": checks.check_layout,
    "fake": checks.check_fake,
    "precision": checks.check_precision,
    "reference": checks.check_reference,
    "gradient": gradients.check_gradient,
    "gradient_layout": gradients.check_gradient_layout,
    "gradient_mutation": gradients.check_gradient_mutation,
    "gradient_alone": gradients.check_gradient_alone,
    "double_backward": gradients.check_double_backward,
    "autocast": gradients.check_autocast,
    "compile": checks.check_compile,
    "rows": checks.check_rows,
    "crash": checks.check_crash,
}
