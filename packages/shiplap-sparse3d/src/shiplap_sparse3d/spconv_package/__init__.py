"""The parts of spconv beside ``spconv.pytorch``: ``drop_in`` puts this package where ``import spconv`` finds it.

Names of spconv 1.x, which were at the top (``spconv.SubMConv3d``), are found here too.
"""

from shiplap_sparse3d import spconv as pytorch
from shiplap_sparse3d.spconv.constants import SPCONV_VERSION_NUMBERS, __version__
from shiplap_sparse3d.spconv_package import constants, core, cppconstants, ops, tools, utils

__all__ = [
    "SPCONV_VERSION_NUMBERS",
    "__version__",
    "constants",
    "core",
    "cppconstants",
    "ops",
    "pytorch",
    "tools",
    "utils",
]


def __getattr__(name: str) -> object:
    """Return the member ``name`` of ``spconv.pytorch``, which spconv 1.x had here. Raise ``AttributeError`` for other
    names.
    """
    if name in pytorch.__all__:
        return getattr(pytorch, name)
    raise AttributeError(f"module 'spconv' has no attribute {name!r}")
