"""``sl.cabi`` behind a check of its arguments."""

from __future__ import annotations

from shiplap.declare.keyword_values import with_checked_arguments
from shiplap.kernels.c import declaration

cabi = with_checked_arguments(declaration.cabi)
