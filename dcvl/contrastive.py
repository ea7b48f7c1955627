"""Contrastive losses of images and texts over the pairs of all ranks: SigLIP's sigmoid, and CLIP's softmax.

In a global batch of N pairs each rank compares its images and texts with those of all ranks. Its loss is its share of
the total, multiplied by the number of ranks, so that the mean over ranks in data-parallel training equals the loss of
one process.
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
    """Pairs of embedded images and texts.

    Attributes:
        images: Normalized image embeddings [B, E].
        texts: Normalized text embeddings [B, E].
        input_ids: Tokens of the texts [B, T].
        counts: Whether a pair is valid [B], boolean.
    """

    images: Tensor
    texts: Tensor
    input_ids: Tensor
    counts: Tensor


def contrastive_loss(kind: Contrastive, pairs: ContrastiveBatch, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Compute this rank's share of the loss.

    Texts that occur in several pairs are not used as negatives of each other.

    Args:
        kind: "sigmoid" (Zhai et al., 2023, algorithm 1) or "softmax" (Radford et al., 2021, figure 3).
        pairs: Pairs of this rank; their number is the same on all ranks.
        scale: Scale of the cosine similarities, a scalar or [1].
        bias: Bias added afterwards, a scalar or [1]; None for none.

    Returns:
        A scalar; 0 if there are no valid pairs.

    Raises:
        ValueError: If `kind` is unknown, or a shape is wrong.
    """
    if kind not in get_args(Contrastive):
        raise ValueError(f"{kind=}: expected one of {', '.join(map(repr, get_args(Contrastive)))}.")
    if pairs.counts.shape != pairs.images.shape[:1] or pairs.counts.dtype != torch.bool:
        got = f"{pairs.counts.dtype} {list(pairs.counts.shape)}"
        raise ValueError(f"counts is {got}: expected booleans {list(pairs.images.shape[:1])}, one per pair.")
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
    """Mask of the pairs of a row of this rank and a row of all ranks that are used [B, N]."""
    texts = everyone.input_ids.unique(dim=0, return_inverse=True)[1]  # an index per distinct text
    different = ~(texts[own, None] == texts).scatter(1, own[:, None], False)
    return different & pairs.counts[:, None] & everyone.counts[None]


def _cross_entropy(logits: Tensor, used: Tensor, own: Tensor, counts: Tensor) -> Tensor:
    """Sum over valid rows of the cross-entropy of the partner [B] among the used columns [B, N]."""
    logits = logits.masked_fill(~used, -torch.inf)[counts]
    return F.cross_entropy(logits, own[counts], reduction="sum")


def _gathered(pairs: ContrastiveBatch) -> tuple[ContrastiveBatch, int]:
    """Gather the pairs of all ranks [N, ...], with gradients; return also the index of this rank's first pair."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return pairs, 0
    return ContrastiveBatch(*map(_Gather.apply, pairs)), dist.get_rank() * len(pairs.counts)


class _Gather(torch.autograd.Function):
    """All-gather of rows [N, ...]; in the backward pass the gradients of all ranks are summed."""

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
