"""The interface for packages of kernels, beside ``shiplap`` itself. It is documented in ``docs/extend.md`` and stable.

This module has what nearly every family needs and imports quickly: errors, the Triton launcher, the locations of
libraries. Each of the following modules covers one subject and is imported by the families that need it:

``shiplap.plugin_api.compiling`` counts of graphs, breaks and recompiles, and declarations of sizes that vary.
``shiplap.plugin_api.exporting`` exported programs as one file.
``shiplap.plugin_api.files`` files that are written whole or not at all. ``shiplap.plugin_api.installed`` the families
that are installed. ``shiplap.plugin_api.interpreting`` Triton without a GPU. ``shiplap.plugin_api.memos`` values that
are computed once and kept. ``shiplap.plugin_api.rewriting`` the parts of rewrites. ``shiplap.plugin_api.timing`` times
of functions that run in turn, and a progress bar. ``shiplap.plugin_api.tuning`` choices among configs that a vendor's
library lists. ``shiplap.plugin_api.verbs`` printing, writing and refusing for verbs of the command line.

A family that needs more has found a gap in this interface. Please report the gap instead of importing internals.
"""

from shiplap.dispatch.tuned_choices import check_configs
from shiplap.errors import error, notice
from shiplap.errors import register as register_errors
from shiplap.kernels.triton import LateErrors, Launcher, TritonLaunches, late_launches, launch_program, triton_launcher
from shiplap.plugin_api.libraries import find_library, library_folder
from shiplap.torch_private.dispatcher_calls import is_hooked, is_last_backward
from shiplap.tuning.allowed import blocked

__all__ = [
    "LateErrors",
    "Launcher",
    "TritonLaunches",
    "blocked",
    "check_configs",
    "error",
    "find_library",
    "is_hooked",
    "is_last_backward",
    "late_launches",
    "launch_program",
    "library_folder",
    "notice",
    "register_errors",
    "triton_launcher",
]
