"""Forward pass over chunks of batch rows and queries with their visible keys, on a reused workspace.

    x = scale q k^T;  composed_weights (of short rows: short_weights);  o = x v

Scores in the workspace are in units of log 2. Heads that share keys and values are rows of one product.
"""

import torch
from torch import Tensor

from . import kernels, short_kernels
from .call import Attention
from .products import multiply_queries, put_product

LOG2E = 1.4426950408889634


def forward(call: Attention) -> tuple[Tensor, Tensor]:
    """Compute the output [B, H, T, D], and the base-2 log-sum-exps, of `lse_shape`."""
    buffer = call.workspace()
    kernel = short_kernels.short_weights if call.is_short else kernels.composed_weights
    out = torch.empty_like(call.q) if call.plan else torch.zeros_like(call.q)
    for chunk in call.plan:
        x = call.scores(buffer, chunk)
        multiply_queries(call.queries(call.q, chunk), call.keys(call.k, chunk), call.scale * LOG2E, x)
        call.run(kernel, chunk, (buffer, call.lse[0]))
        put_product(out, x, call.keys(call.v, chunk), 1.0, chunk, call)
    return out, call.lse
