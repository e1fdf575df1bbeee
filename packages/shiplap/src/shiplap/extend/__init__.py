"""The interface for packages of kernels, beside ``shiplap`` itself. It is documented in ``docs/extend.md`` and stable.

This module has what nearly every family needs and imports quickly: errors, the Triton launcher, the locations of
libraries. Each of the following modules covers one subject and is imported by the families that need it:

``shiplap.extend.compiling`` counts of graphs, breaks and recompiles, and declarations of sizes that vary.
``shiplap.extend.files`` files that are written whole or not at all. ``shiplap.extend.installed`` the families that are
installed. ``shiplap.extend.interpreting`` Triton without a GPU. ``shiplap.extend.rewriting`` the parts of rewrites.
``shiplap.extend.timing`` times of functions that run in turn, and a progress bar. ``shiplap.extend.tuning`` choices
among configs that a vendor's library lists.
``shiplap.extend.verbs`` printing, writing and refusing for verbs of the command line.

A family that needs more has found a gap in this interface. Please report the gap instead of importing internals.
"""

from shiplap.bind import LateErrors, Launcher, TritonLaunches, late_launches, launch_program, triton_launcher
from shiplap.compat.calls import is_hooked
from shiplap.errors import error, notice
from shiplap.errors import register as register_errors
from shiplap.extend.libraries import find_library, library_folder
from shiplap.op.choices import check_configs
from shiplap.selection.guard import blocked

__all__ = [
    "LateErrors",
    "Launcher",
    "TritonLaunches",
    "blocked",
    "check_configs",
    "error",
    "find_library",
    "is_hooked",
    "late_launches",
    "launch_program",
    "library_folder",
    "notice",
    "register_errors",
    "triton_launcher",
]
