"""The modules that ``torch.compile`` imports at its first call, which takes seconds.

A process that forks others imports this module, so that none of them has to. No thread and no process is started.
"""

import torch._dynamo
import torch._inductor.compile_fx

__all__ = ["torch"]
