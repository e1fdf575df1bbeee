"""Ops with one defect each, and sound twins of the same kind: what the power of the audit is measured with.

The defects were written without knowledge of the checks, from what goes wrong in kernels. Half of them, by the hash of
their names, is ``held_out``: whoever writes checks does not look at those. The defects of the files ``later_*`` were
written when the checks had been repaired for both halves.
"""

from importlib import import_module

from shiplap_testing.defects.defect import CAUSES, DEFECTS, Defect

__all__ = ["CAUSES", "Defect", "defects"]

_FILES = (
    "size",
    "size_limits",
    "values_float",
    "values_exact",
    "values_indices",
    "scalars",
    "scalars_edges",
    "gradient",
    "gradient_terms",
    "gradient_state",
    "layout",
    "aliasing",
    "aliasing_inputs",
    "state",
    "state_calls",
    "transforms",
    "lists",
    "outputs",
    "promotion",
    "process",
    "triton_ops",
    "later_size",
    "later_values",
    "later_scalars",
    "later_gradient",
    "later_transforms",
    "later_state",
    "later_triton",
)


def defects() -> dict[str, Defect]:
    """Import the modules that plant defects, and return a mapping from the name of each defect to the defect. No op is
    declared until ``make_bad`` or ``make_good`` of a defect is called.
    """
    for file in _FILES:
        # Importing a file registers its defects.
        import_module(f"shiplap_testing.defects.{file}")
    return DEFECTS
