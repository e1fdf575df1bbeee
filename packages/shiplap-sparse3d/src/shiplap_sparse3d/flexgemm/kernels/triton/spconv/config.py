"""``flex_gemm.kernels.triton.spconv.config``: whether the convolutions of FlexGEMM 1.x may round to TF32.

The value is read at each call. The module's ``autotune_config`` of FlexGEMM is not here, since there is no autotuner.
"""

from __future__ import annotations

allow_tf32: bool | None = None
"""Whether a GPU may round float32 factors to TF32; None: as ``torch.backends.cuda.matmul.allow_tf32`` says."""
