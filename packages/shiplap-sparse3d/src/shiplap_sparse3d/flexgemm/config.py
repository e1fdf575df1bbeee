"""``flex_gemm.config``: the settings of FlexGEMM 2.0 by name.

``DEFAULT_SPCONV_ALGORITHM`` and ``SPCONV_ALLOW_TF32`` are read at each call. The others belong to the autotuner and the
CUDA extension of FlexGEMM: there are none here, so they are accepted without effect.
"""

from __future__ import annotations

from shiplap_sparse3d.flexgemm.algorithms import DEFAULT

DEFAULT_SPCONV_ALGORITHM: str = DEFAULT
"""The algorithm of calls that name none."""

SPCONV_ALLOW_TF32: bool | None = None
"""Whether a GPU may round float32 factors to TF32; None: as ``torch.backends.cuda.matmul.allow_tf32`` says."""

USE_AUTOTUNE_CACHE = AUTOSAVE_AUTOTUNE_CACHE = AUTOTUNE_STORE_META = False
AUTOTUNE_MODE = "never"
AUTOTUNE_ADAPTIVE_THRESHOLD = 100
AUTOTUNE_CACHE_PATH = ""
IS_CUDA_EXTENSION_AVAILABLE = USE_CUDA_EXTENSION = False
CUDA_HASHMAP_RATIO = 2.0
CUDA_OUT_COORD_HASHMAP_RATIO = 1.1
CUDA_OUT_COORD_ALGO = "hashmap"
CUDA_SERIALIZATION_MODE = "bxyz"
