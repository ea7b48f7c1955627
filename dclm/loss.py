"""Cross-entropy computed from hidden states in chunks of tokens."""

# B batch, T tokens, C model width, V vocabulary, M tokens in a row

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from dcmha.autocast import autocast_dtype
from dctrain.distributed.tensor_parallel import copy_to_ranks

IGNORED = -100
CHUNK_LOGITS = 2**27  # logits per chunk: 512 MiB in float32


def token_loss(hidden: Tensor, output: Tensor, targets: Tensor, *, chunk_logits: int = CHUNK_LOGITS) -> Tensor:
    """Compute the mean cross-entropy of the targets without storing all logits.

    Logits of a chunk are recomputed in the backward pass. Logits, softmax and sums are in max(dtype, float32): in 16
    bits they would add noise of 0.01 nats per token (`benchmarks/results/logits.json`).

    Args:
        hidden: Final hidden states [B, T, C].
        output: Output embedding [V, C]. If it is a DTensor split over ranks, so are the logits, and forward and
            backward must run within `torch.distributed.tensor.parallel.loss_parallel`.
        targets: Token ids [B, T]; -100 is ignored.
        chunk_logits: Approximate number of logits per chunk.

    Returns:
        Mean over the targets, a scalar; 0 if all are ignored.
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
    """Likelihood of M tokens.

    Attributes:
        log_likelihoods: Log-likelihood of each token in nats [M], in max(dtype, float32).
        is_greedy: Whether each token is the most likely one [M], bool.
    """

    log_likelihoods: Tensor
    is_greedy: Tensor


@torch.no_grad()
def score_targets(hidden: Tensor, output: Tensor, targets: Tensor) -> Likelihood:
    """Compute the likelihood of each token without storing all logits, which are in max(dtype, float32).

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
    """Compute the likelihood of tokens [M] from logits [M, V], in max(dtype, float32)."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    of_targets = logits.gather(1, targets[:, None]).squeeze(1)
    return Likelihood(of_targets - logits.logsumexp(1), logits.argmax(1) == targets)


def _as_computed(hidden: Tensor, output: Tensor) -> tuple[Tensor, Tensor, "_SplitVocabulary | None"]:
    """Return this rank's part of a split output layer, in the autocast dtype."""
    split = None
    if isinstance(output, DTensor):
        split = _SplitVocabulary(output.device_mesh, output.shape[0])
        hidden, output = copy_to_ranks(hidden, split.mesh), output.to_local()
    dtype = autocast_dtype(hidden.device.type)
    return (hidden, output, split) if dtype is None else (hidden.to(dtype), output.to(dtype), split)


def without_autocast(x: Tensor) -> AbstractContextManager:
    """Disable autocast, which would round logits."""
    if autocast_dtype(x.device.type) is None:
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


class _SplitVocabulary(NamedTuple):
    """Mesh of ranks that each have the logits of a part of the vocabulary."""

    mesh: DeviceMesh
    size: int

    def joined(self, logits: Tensor) -> DTensor:
        """Convert a rank's logits [M, ...] to a DTensor [M, V]."""
        shape = torch.Size((len(logits), self.size))
        return DTensor.from_local(logits, self.mesh, [Shard(1)], run_check=False, shape=shape, stride=(self.size, 1))


def _summed_loss(hidden: Tensor, output: Tensor, targets: Tensor, split: _SplitVocabulary | None) -> Tensor:
    logits = wide_logits(hidden, output)
    if split is None:
        return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    targets = DTensor.from_local(targets, split.mesh, [Replicate()], run_check=False)
    return F.cross_entropy(split.joined(logits), targets, ignore_index=IGNORED, reduction="sum").to_local()


def wide_logits(hidden: Tensor, output: Tensor) -> Tensor:
    """Multiply hidden states [M, C] by an output embedding [V, C]; logits [M, V] in max(dtype, float32)."""
    return _WideProduct.apply(hidden, output) if hidden.dtype.itemsize < 4 else F.linear(hidden, output)


class _WideProduct(torch.autograd.Function):
    """a @ b.T of 16-bit matrices with a float32 result; the usual product rounds to 16 bits."""

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
