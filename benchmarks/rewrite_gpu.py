"""``benchmarks/rewrite.py`` on CUDA: larger blocks, and with CUDA graphs.

python benchmarks/rewrite_gpu.py [--json benchmarks/results/rewrite_gpu.json]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from rewrite import main

if __name__ == "__main__":
    main(["--device", "cuda", *sys.argv[1:]])
