"""The gated delta rule for PyTorch: forward, backward and step by step.

Importing never fails. If the compiled library cannot be loaded, the first call raises and says why; `device_support("cpu")`
says it too.
"""

from . import _autograd, _fake, ops, utils  # noqa: F401  (the first two register gradients and shapes with torch)
from ._call import device_support
from ._explain import Explanation, explain
from ._load import __version__
from .ops.gated_delta_rule import (
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
    chunk_gated_delta_rule_pool,
    chunk_gdn,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn,
    num_checkpoints,
    recurrent_gated_delta_rule_pool,
)

__all__ = [
    "Explanation",
    "__version__",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_bwd",
    "chunk_gated_delta_rule_fwd",
    "chunk_gated_delta_rule_pool",
    "chunk_gdn",
    "device_support",
    "explain",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "num_checkpoints",
    "recurrent_gated_delta_rule_pool",
]
