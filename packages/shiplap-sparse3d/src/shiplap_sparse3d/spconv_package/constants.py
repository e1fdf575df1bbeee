"""``spconv.constants``: settings that models write. None of them changes anything here."""

from __future__ import annotations

from pathlib import Path

from shiplap_sparse3d.spconv.constants import SPCONV_VERSION_NUMBERS, __version__

__all__ = ["ALL_WEIGHT_IS_KRSC", "FILTER_HWIO", "SPCONV_VERSION_NUMBERS", "AllocKeys", "__version__"]

PACKAGE_NAME = "spconv"
PACKAGE_ROOT = Path(__file__).parent
EDITABLE_INSTALLED = False
DISABLE_JIT = True
NDIM_DONT_CARE = 3
FILTER_HWIO = False
ALL_WEIGHT_IS_KRSC = True
SAVED_WEIGHT_LAYOUT = ""
BOOST_ROOT = None
SPCONV_DEBUG_SAVE_PATH = ""
SPCONV_BWD_SPLITK = [1, 2, 4, 8, 16, 32, 64]
SPCONV_ALLOW_TF32 = False
SPCONV_CPP_INDICE_PAIRS = True
SPCONV_CPP_INDICE_PAIRS_IGEMM = False
SPCONV_CPP_GEMM = True
SPCONV_FX_TRACE_MODE = False
SPCONV_USE_DIRECT_TABLE = True
SPCONV_DIRECT_TABLE_HASH_SIZE_SCALE = 1.1
SPCONV_DO_SORT = True
SPCONV_INT8_DEBUG = False


class AllocKeys:
    """The names of the buffers of spconv's kernels, for code that refers to them. Shiplap allocates no buffer under
    these names.
    """

    PairFwd, PairBwd, PairMask, PairMaskBwd = "PairFwd", "PairBwd", "PairMask", "PairMaskBwd"
    MaskArgSort, MaskArgSortBwd, MaskOutputFwd = "MaskArgSort", "MaskArgSortBwd", "MaskOutputFwd"
    IndiceNumPerLoc, OutIndices, OutFeatures = "IndiceNumPerLoc", "OutIndices", "OutFeatures"
    Features, Filters, OutBp, DIn, DFilters = "Features", "Filters", "OutBp", "DIn", "DFilters"
    InpBuffer, OutBuffer, ThrustTemp = "InpBuffer", "OutBuffer", "ThrustTemp"
    IndicePairsUniq, IndicePairsUniqBackup = "IndicePairsUniq", "IndicePairsUniqBackup"
    HashKOrKV, HashV, TightUniqueCount = "HashKOrKV", "HashV", "TightUniqueCount"
