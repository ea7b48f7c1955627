"""Cross-entropy straight from hidden states, a chunk of tokens at a time."""

# B batch, T tokens, C model width, V vocabulary, M tokens in a row

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from dcmha.functional import autocast_dtype
from dctrain.distributed.tensor_parallel import copy_to_ranks

IGNORED = -100
CHUNK_LOGITS = 2**27  # logits of a chunk: 512 MiB in float32


def token_loss(hidden: Tensor, output: Tensor, targets: Tensor, *, chunk_logits: int = CHUNK_LOGITS) -> Tensor:
    """Average the cross-entropy of the targets, without ever holding all logits.

    Logits of a chunk are made, used and dropped, and made again in the backward pass. They, the softmax and sums are of
    max(dtype, float32): rounded to 16 bits they add noise of 0.01 nats a token (`benchmarks/results/logits.json`).

    Args:
        hidden: Final hidden states [B, T, C].
        output: Output embedding [V, C]; if it is split over ranks (a DTensor), so are the logits, and what calls this
            and differentiates it does so within `torch.distributed.tensor.parallel.loss_parallel`.
        targets: Token ids [B, T]; -100 does not count.
        chunk_logits: Logits held at once, about.

    Returns:
        Mean over the targets that count, a scalar; 0 if none does.
    """
    hidden, targets = hidden.flatten(0, 1), targets.flatten()
    size = max(1, chunk_logits // output.shape[0])
    hidden, output, split = _as_computed(hidden, output)
    chunks = list(zip(hidden.split(size), targets.split(size), strict=True))
    with without_autocast(hidden):
        if len(chunks) == 1:
            losses = [_summed_loss(hidden, output, targets, split)]
        else:
            losses = [checkpoint(_summed_loss, h, output, t, split, use_reentrant=False) for h, t in chunks]
    return sum(losses) / (targets != IGNORED).sum().clamp(min=1)


class Likelihood(NamedTuple):
    """What the model makes of some tokens, M of them.

    Attributes:
        log_likelihoods: Of each token, in nats: [M] of max(dtype, float32).
        is_greedy: Whether each token is the likeliest: [M] bool.
    """

    log_likelihoods: Tensor
    is_greedy: Tensor


@torch.no_grad()
def score_targets(hidden: Tensor, output: Tensor, targets: Tensor) -> Likelihood:
    """Score tokens one by one, without ever holding all logits, which are of max(dtype, float32).

    Args:
        hidden: Final hidden states [M, C].
        output: Output embedding [V, C], possibly split over ranks (a DTensor).
        targets: Token ids [M].
    """
    parts = []
    size = max(1, CHUNK_LOGITS // output.shape[0])
    hidden, output, split = _as_computed(hidden, output)
    with without_autocast(hidden):
        for chunk, wanted in zip(hidden.split(size), targets.split(size), strict=True):
            logits = wide_logits(chunk, output)
            parts.append(score_logits(logits if split is None else split.joined(logits).full_tensor(), wanted))
    return Likelihood(*map(torch.cat, zip(*parts, strict=True)))


def score_logits(logits: Tensor, targets: Tensor) -> Likelihood:
    """Score tokens [M] by their logits [M, V], in max(dtype, float32)."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    of_targets = logits.gather(1, targets[:, None]).squeeze(1)
    return Likelihood(of_targets - logits.logsumexp(1), logits.argmax(1) == targets)


def _as_computed(hidden: Tensor, output: Tensor) -> tuple[Tensor, Tensor, "_SplitVocabulary | None"]:
    """Take this rank's part of a split output, and the dtype of autocast."""
    split = None
    if isinstance(output, DTensor):
        split = _SplitVocabulary(output.device_mesh, output.shape[0])
        hidden, output = copy_to_ranks(hidden, split.mesh), output.to_local()
    dtype = autocast_dtype(hidden.device.type)
    return (hidden, output, split) if dtype is None else (hidden.to(dtype), output.to(dtype), split)


def without_autocast(x: Tensor) -> AbstractContextManager:
    """Keep autocast, where it is on, from rounding logits."""
    if autocast_dtype(x.device.type) is None:
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


class _SplitVocabulary(NamedTuple):
    """Ranks of which each has the logits of a part of the vocabulary."""

    mesh: DeviceMesh
    size: int

    def joined(self, logits: Tensor) -> DTensor:
        """Tell of a rank's logits [M, ...] that they are a part of [M, V]."""
        shape = torch.Size((len(logits), self.size))
        return DTensor.from_local(logits, self.mesh, [Shard(1)], run_check=False, shape=shape, stride=(self.size, 1))


def _summed_loss(hidden: Tensor, output: Tensor, targets: Tensor, split: _SplitVocabulary | None) -> Tensor:
    logits = wide_logits(hidden, output)
    if split is None:
        return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    targets = DTensor.from_local(targets, split.mesh, [Replicate()], run_check=False)
    return F.cross_entropy(split.joined(logits), targets, ignore_index=IGNORED, reduction="sum").to_local()


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
