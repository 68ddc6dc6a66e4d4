"""The normalisation that the operations can do inside, for callers that do it outside."""

import torch
from torch import Tensor

from .._arguments import expect_tensors


def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dimension, computed in at least float32. Differentiable.

    Args:
        x: any shape, floating point.
        eps: added to the sum of squares (not to their mean, nor to the root).
        output_dtype: of the result; default the dtype of x.

    >>> import torch
    >>> from flash_qla.utils import l2norm
    >>> l2norm(torch.tensor([3.0, 4.0]))
    tensor([0.6000, 0.8000])
    """
    expect_tensors(x=x)
    if not x.is_floating_point():
        raise TypeError(f"x: expected floating point, got {x.dtype}")
    if output_dtype is not None and not output_dtype.is_floating_point:
        raise TypeError(f"output_dtype: expected floating point, got {output_dtype}")
    wide = x if x.dtype == torch.float64 else x.float()
    normalised = wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)
    return normalised.to(output_dtype or x.dtype)
