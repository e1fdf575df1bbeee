"""What a distribution of kernels may use beside ``shiplap`` itself; documented in ``docs/extend.md``, and kept stable.

This module has what nearly every family needs and what costs nothing to import: errors, the Triton launcher, where
libraries lie. The rest is in one module per subject, each imported by whoever needs it:

``shiplap.extend.compiling``
    counts of graphs, breaks and recompiles, and which sizes vary.
``shiplap.extend.installed``
    the families that are installed.
``shiplap.extend.rewriting``
    what rewrites are made of.
``shiplap.extend.timing``
    times of functions taken in turn, and a progress bar.
``shiplap.extend.tuning``
    choices among configs that a vendor's library lists.
``shiplap.extend.verbs``
    what a verb of the command line prints, writes and refuses.

A family that needs more than this has found a gap in the interface: it is closed here, not by an import from within.
"""

from shiplap.bind import Launcher, triton_launcher
from shiplap.errors import error, notice
from shiplap.errors import register as register_errors
from shiplap.extend.libraries import find_library, library_folder
from shiplap.op.choices import check_configs
from shiplap.selection.guard import blocked

__all__ = [
    "Launcher",
    "blocked",
    "check_configs",
    "error",
    "find_library",
    "library_folder",
    "notice",
    "register_errors",
    "triton_launcher",
]
