"""Composed attention on CPUs: C++ that processes blocks of queries in one pass, forward and backward.

Scores and weights of a block stay in a core's cache; nothing of size T x S is stored. Computations are in float32.
`library.py` compiles the source for the local processor, `op.py` defines the PyTorch operator. Imported on first use.
"""

import torch
from torch import Tensor

from ...weights import ComposeWeights
from ..call import AttentionCall
from ..masking import both_visible, mask_of_documents
from .arguments import WEIGHTS
from .op import ComposedAttention, composed


def attention(call: AttentionCall) -> Tensor:
    """Compute composed attention of a call that "cpu" supports (`why_not_cpu`): [B, H, T, D]."""
    weights = [*_weights(call.pre), *_weights(call.post)]
    visible = call.visible
    if call.document_ids is not None:
        visible = both_visible(visible, mask_of_documents(call.document_ids, call.q.shape[2]))
    bias, visible = (m if m is None else m[(None,) * (4 - m.dim())] for m in (call.bias, visible))
    options = (call.is_causal, call.window_size or 0, call.scale, call.num_groups)
    operator = composed if torch.compiler.is_compiling() else ComposedAttention.apply
    return operator(call.q, call.k, call.v, *weights, bias, visible, *options)[0]


def _weights(weights: ComposeWeights | None) -> list[Tensor | None]:
    return [None] * WEIGHTS if weights is None else [*weights.query, *weights.key, weights.base]
