"""Arguments of the C++ functions: addresses, strides and sizes of tensors, as structures of `attention.cpp`."""

# B batch, T query tokens, S key tokens, H heads, D head dim, G head groups

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

WEIGHTS = 7  # tensors per composition: down, up and gate of the query side, of the key side, and the base
KEY_WEIGHTS = range(3, 6)
BASE = 6
SHARED_KEYS = 128  # minimum keys per share
FORWARD = struct.Struct("=13qd16q2q64q8q")
BACKWARD = struct.Struct("=16q64q5q")
Weights = Sequence[Tensor | None]  # weights of both compositions


class CallOptions(NamedTuple):
    """Options of a call; window 0 means none."""

    is_causal: bool
    window_size: int
    scale: float
    num_groups: int


class WorkSplit(NamedTuple):
    """Distribution of the work over threads.

    Attributes:
        threads: Number of threads.
        parts: Parts that the queries of one batch row are divided into.
        slots: Work items that one thread processes sequentially and that can therefore share one sum.
        shares: Parts that the keys of one batch row are divided into, if its queries are not.
    """

    threads: int
    parts: int
    slots: int
    shares: int = 1


def share(B: int, num_blocks: int, has_sums: bool) -> WorkSplit:
    """Distribute a call of B rows, each with several blocks of queries, evenly over the threads.

    Args:
        B: Batch rows.
        num_blocks: Blocks of queries per row.
        has_sums: Whether each part needs its own sums of the size of the keys; then there are few parts.
    """
    threads = torch.get_num_threads()
    wanted = threads if has_sums and B == 1 else 4 * threads
    is_even = threads == 1 or B % threads == 0 or 2 * wanted <= B
    parts = 1 if is_even else max(1, min(-(-wanted // B), num_blocks))
    return WorkSplit(threads, parts, parts * B)


def share_keys(B: int, num_blocks: int, S: int) -> WorkSplit:
    """Distribute a forward call of B rows by queries, or by keys if queries are one block and threads would be idle."""
    split = share(B, num_blocks, has_sums=False)
    shares = min(split.threads // max(B, 1), S // SHARED_KEYS) if num_blocks == 1 else 1
    return split._replace(shares=shares) if shares > 1 else split


def dense(x: Tensor | None) -> Tensor | None:
    """Convert to float32 with a contiguous last axis."""
    if x is None:
        return None
    if x.is_neg() or torch._is_zerotensor(x):  # their memory does not contain the values
        x = x.clone()
    x = x if x.dtype == torch.float32 else x.float()
    return x if x.stride(-1) == 1 else x.contiguous()


def matrix(x: Tensor) -> tuple[int, ...]:
    """Address and strides of [B, H, tokens, D]."""
    return x.data_ptr(), *x.stride()[:3]


def compositions(weights: Weights) -> list[int]:
    """Addresses and strides of the weights of two compositions."""
    values = []
    for start in (0, WEIGHTS):
        *sides, base = weights[start : start + WEIGHTS]
        values.append(int(any(w is not None for w in (*sides, base))))
        for w in sides:
            values += _weight(w)
        values.append(0 if base is None else base.data_ptr())
    return values


def _weight(w: Tensor | None) -> tuple[int, ...]:
    if w is None:
        return (0,) * 5
    row, token, *rank = w.stride()[:-1]
    return w.data_ptr(), row, token, rank[0] if rank else 0, w.shape[2] if rank else 1


def full_rows(mask: Tensor | None, S: int) -> Tensor | None:
    """Expand a mask along the keys."""
    if mask is None:
        return None
    mask = mask.expand(*mask.shape[:-1], S)
    return mask.contiguous() if mask.dtype == torch.bool else mask.float().contiguous()


def mask_strides(mask: Tensor | None) -> tuple[int, ...]:
    """Address and strides of a mask, with stride 0 for broadcast axes."""
    if mask is None:
        return (0,) * 4
    strides = zip(mask.shape[:3], mask.stride()[:3], strict=True)
    return mask.data_ptr(), *(0 if size == 1 else stride for size, stride in strides)
