"""Composed attention on CPUs: C++ that processes blocks of queries in one pass, forward and backward.

Scores and weights of a block stay in a core's cache; nothing of size T x S is stored. Computations are in float32.
`library.py` compiles the source for the local processor, `op.py` defines the PyTorch operator. Imported on first use.
"""

from torch import Tensor

from ..call import AttentionCall
from .op import attention as operator


def attention(call: AttentionCall) -> Tensor:
    """Compute composed attention of a call that "cpu" supports (`why_not_cpu`): [B, H, T, D]."""
    return operator(call, None)
