"""The defects, one module for each kind of op."""

from importlib import import_module

from ..registry import CASES, Case

MODULES = ["norms", "losses", "attention", "scans", "gather", "gradients", "randoms", "memory", "numbers", "adopted"]


def load_cases() -> dict[str, Case]:
    """Return all cases by name: importing a module declares its ops."""
    for name in MODULES:
        import_module(f"{__name__}.{name}")
    return CASES
