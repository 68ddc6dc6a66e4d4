"""The gated delta rule: whole sequences in chunks, a few tokens at a time, and both on a pool of states."""

from .chunk import chunk_gated_delta_rule, chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd, chunk_gdn
from .fused_recurrent import fused_recurrent_gated_delta_rule, fused_recurrent_gdn
from .pool import chunk_gated_delta_rule_pool, num_checkpoints, recurrent_gated_delta_rule_pool

__all__ = [
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_bwd",
    "chunk_gated_delta_rule_fwd",
    "chunk_gated_delta_rule_pool",
    "chunk_gdn",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "num_checkpoints",
    "recurrent_gated_delta_rule_pool",
]
