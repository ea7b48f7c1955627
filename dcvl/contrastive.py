"""Contrastive losses of images and texts over the pairs of all ranks: SigLIP's sigmoid, and CLIP's softmax.

Of a global batch of N pairs each rank takes the images and texts that it holds against those of all. Its loss is what
it adds to the whole, times the number of ranks: the mean over ranks, which data-parallel training takes of gradients,
is that of one process.
"""

# B pairs of this rank, N of all ranks, E embedding width, T tokens

from typing import Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dclm.loss import without_autocast

Contrastive = Literal["sigmoid", "softmax"]


class ContrastiveBatch(NamedTuple):
    """Embedded images and texts that belong together, row by row.

    Attributes:
        images: [B, E], of length 1.
        texts: [B, E], likewise.
        input_ids: The texts' tokens [B, T].
        counts: Whether a pair counts [B], boolean.
    """

    images: Tensor
    texts: Tensor
    input_ids: Tensor
    counts: Tensor


def contrastive_loss(kind: Contrastive, pairs: ContrastiveBatch, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Compute this rank's part of the loss, as the module says.

    A text that another pair has too is no negative example: such pairs are left out, but for a pair's own.

    Args:
        kind: "sigmoid" (Zhai et al., 2023, algorithm 1) or "softmax" (Radford et al., 2021, figure 3).
        pairs: Those of this rank; on every rank as many.
        scale: Multiplies cosines; a scalar, or [1].
        bias: Is added then, likewise; None for none.

    Returns:
        A scalar, 0 if no pair counts.

    Raises:
        ValueError: If `kind` is unknown, or a shape does not fit.
    """
    if kind not in get_args(Contrastive):
        raise ValueError(f"{kind=}: expected one of {', '.join(map(repr, get_args(Contrastive)))}.")
    if pairs.counts.shape != pairs.images.shape[:1] or pairs.counts.dtype != torch.bool:
        got = f"{pairs.counts.dtype} {list(pairs.counts.shape)}"
        raise ValueError(f"counts is {got}: expected booleans {list(pairs.images.shape[:1])}, one for each pair.")
    for name, x in (("scale", scale), ("bias", bias)):
        if x is not None and x.numel() != 1:
            raise ValueError(f"{name} has shape {list(x.shape)}: expected a scalar, or [1].")
    with without_autocast(pairs.images):
        return _loss(kind, pairs, scale, bias)


def _loss(kind: Contrastive, pairs: ContrastiveBatch, scale: Tensor, bias: Tensor | None) -> Tensor:
    everyone, first = _gathered(pairs)
    own = first + torch.arange(len(pairs.counts), device=pairs.counts.device)
    offset = 0.0 if bias is None else bias
    used = _used(pairs, everyone, own)
    from_images = pairs.images @ everyone.texts.mT * scale + offset
    if kind == "sigmoid":
        signs = torch.full_like(from_images, -1.0).scatter_(1, own[:, None], 1.0)
        total = (-F.logsigmoid(signs * from_images)).masked_fill(~used, 0.0).sum()
    else:
        from_texts = pairs.texts @ everyone.images.mT * scale + offset
        total = sum(_cross_entropy(logits, used, own, pairs.counts) for logits in (from_images, from_texts)) / 2
    ranks = len(everyone.counts) // max(1, len(pairs.counts))
    return total * ranks / everyone.counts.sum().clamp(min=1)


def _used(pairs: ContrastiveBatch, everyone: ContrastiveBatch, own: Tensor) -> Tensor:
    """Tell which pairs of a row of this rank and one of all count [B, N]."""
    texts = everyone.input_ids.unique(dim=0, return_inverse=True)[1]  # a number for each
    different = ~(texts[own, None] == texts).scatter(1, own[:, None], False)
    return different & pairs.counts[:, None] & everyone.counts[None]


def _cross_entropy(logits: Tensor, used: Tensor, own: Tensor, counts: Tensor) -> Tensor:
    """Sum up over rows that count the cross-entropy of finding the partner [B] among what is used [B, N]."""
    logits = logits.masked_fill(~used, -torch.inf)[counts]
    return F.cross_entropy(logits, own[counts], reduction="sum")


def _gathered(pairs: ContrastiveBatch) -> tuple[ContrastiveBatch, int]:
    """Bring the pairs of all ranks together [N, ...]; tell the place of this rank's first. Gradients flow back."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return pairs, 0
    return ContrastiveBatch(*map(_Gather.apply, pairs)), dist.get_rank() * len(pairs.counts)


class _Gather(torch.autograd.Function):
    """Brings the rows of all ranks together [N, ...]; each rank's get the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx, rows: Tensor) -> Tensor:
        ctx.count = len(rows)
        everyone = rows.new_empty(dist.get_world_size() * len(rows), *rows.shape[1:])
        dist.all_gather_into_tensor(everyone, rows.contiguous())
        return everyone

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total.split(ctx.count)[dist.get_rank()]
