"""Next-token cross-entropy straight from hidden states, a chunk of tokens at a time."""

# B batch, T tokens, C model width, V vocabulary

from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from dcmha.functional import autocast_dtype
from dctrain.sharding.tensor_parallel import enter

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

    Logits of a chunk are made, used and dropped, and made again in the backward pass. They, the softmax and sums are of
    max(dtype, float32): rounded to 16 bits they add noise of 0.01 nats a token (`benchmarks/results/logits.json`).

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
    size = max(1, chunk_logits // output.shape[0])
    split = None
    if isinstance(output, DTensor):
        split = _SplitVocabulary(output.device_mesh, output.shape[0])
        hidden, output = enter(hidden, split.mesh), output.to_local()
    dtype = autocast_dtype(hidden.device.type)
    if dtype is not None:
        hidden, output = hidden.to(dtype), output.to(dtype)
    chunks = list(zip(hidden.split(size), targets.split(size), strict=True))
    with nullcontext() if dtype is None else torch.autocast(hidden.device.type, enabled=False):
        if len(chunks) == 1:
            losses = [_summed_loss(hidden, output, targets, split)]
        else:
            losses = [checkpoint(_summed_loss, h, output, t, split, use_reentrant=False) for h, t in chunks]
    return sum(losses) / counts.sum().clamp(min=1)


class _SplitVocabulary(NamedTuple):
    """Ranks of which each has the logits of a part of the vocabulary."""

    mesh: DeviceMesh
    size: int


def _summed_loss(hidden: Tensor, output: Tensor, targets: Tensor, split: _SplitVocabulary | None) -> Tensor:
    logits = wide_logits(hidden, output)
    if split is None:
        return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    mesh, shape = split.mesh, torch.Size((len(logits), split.size))
    logits = DTensor.from_local(logits, mesh, [Shard(1)], run_check=False, shape=shape, stride=(split.size, 1))
    targets = DTensor.from_local(targets, mesh, [Replicate()], run_check=False)
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum").to_local()


def wide_logits(hidden: Tensor, output: Tensor) -> Tensor:
    """Multiply hidden states [M, C] by an output embedding [V, C]; the logits [M, V] are of max(dtype, float32)."""
    return _WideProduct.apply(hidden, output) if hidden.dtype.itemsize < 4 else F.linear(hidden, output)


class _WideProduct(torch.autograd.Function):
    """a @ b.T of 16-bit matrices in float32; the usual product rounds to 16 bits."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        if a.device.type == "cuda":
            return torch.mm(a, b.T, out_dtype=torch.float32)
        return a.float() @ b.float().T

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        gradient = gradient.to(a.dtype)
        return gradient @ b, gradient.T @ a
