"""Next-token cross-entropy straight from hidden states, a chunk of tokens at a time."""

# B batch, T tokens, C model width, V vocabulary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

IGNORED = -100
CHUNK_LOGITS = 2**27  # logits of a chunk: 512 MiB in float32


def next_token_loss(
    hidden: Tensor,
    output: Tensor,
    targets: Tensor,
    *,
    skip_ignored: bool = False,
    chunk_logits: int = CHUNK_LOGITS,
) -> Tensor:
    """Average the cross-entropy of the targets, without ever holding all logits.

    Logits of a chunk are made, used and dropped, and made again in the backward pass. Softmax and sums are done in
    max(dtype, float32).

    Args:
        hidden: Final hidden states [B, T, C].
        output: Output embedding [V, C]; if it is split over ranks (a DTensor), so are the logits, and what calls this
            and differentiates it does so within `torch.distributed.tensor.parallel.loss_parallel`.
        targets: Token ids [B, T]; -100 does not count.
        skip_ignored: Leave tokens that do not count out of the products as well. Worth it where they are many; on a
            GPU it costs a synchronisation.
        chunk_logits: Logits held at once, about.

    Returns:
        Mean over the targets that count, a scalar; 0 if none does.
    """
    hidden, targets = hidden.flatten(0, 1), targets.flatten()
    counts = targets != IGNORED
    if skip_ignored:
        hidden, targets = hidden[counts], targets[counts]
    if isinstance(output, DTensor):
        hidden, targets = (_on_all_ranks(x, output.device_mesh) for x in (hidden, targets))
    size = max(1, chunk_logits // output.shape[0])
    chunks = list(zip(hidden.split(size), targets.split(size), strict=True))
    if len(chunks) == 1:
        losses = [_summed_loss(hidden, output, targets)]
    else:
        losses = [checkpoint(_summed_loss, h, output, t, use_reentrant=False) for h, t in chunks]
    total = sum(losses)
    total = total.to_local() if isinstance(total, DTensor) else total
    return total / counts.sum().clamp(min=1)


def _on_all_ranks(x: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False)


def _summed_loss(hidden: Tensor, output: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(hidden, output)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
