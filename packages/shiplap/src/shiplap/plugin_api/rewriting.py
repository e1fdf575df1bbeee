"""The parts of rewrites, beside ``sl.rewrite``: sample programs, folded norms, and rewrites that ship.

``Rewrite``
    the base class of custom passes; ``PatternRewrite`` is the class of the results of ``sl.rewrite``.
``Program``
    a function with arguments in which a rewrite has to match, and which has to compute the same afterwards.
``FoldedNorm``
    folds an evaluated batch norm into the convolution before it, whatever op computes that; ``conv_norm`` is the one
    for ``torch.nn.functional.conv2d``, whose programs serve others as well, and ``norm_statistics`` draws the mean,
    variance, scale and shift for a program.
``LinearLoss``
    replaces the cross entropy of a linear layer by a function that computes it without its logits.
``no_ops``
    takes out casts and dropouts that do nothing, so that patterns behind it need not spell them.
"""

from shiplap.rewrite import PatternRewrite, Program, Rewrite
from shiplap.rewrite.shipped import conv_norm, no_ops
from shiplap.rewrite.shipped.conv_norm import FoldedNorm
from shiplap.rewrite.shipped.conv_norm import statistics as norm_statistics
from shiplap.rewrite.shipped.linear_loss import LinearLoss

__all__ = ["FoldedNorm", "LinearLoss", "PatternRewrite", "Program", "Rewrite", "conv_norm", "no_ops", "norm_statistics"]
