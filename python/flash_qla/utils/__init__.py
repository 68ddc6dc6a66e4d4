"""Small things that callers of the operations need."""

from .l2norm import l2norm

__all__ = ["l2norm"]
