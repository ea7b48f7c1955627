"""What the C++ takes: addresses, strides and sizes of tensors, as the bytes of the structures in `attention.cpp`."""

# B batch, T query tokens, S key tokens, H heads, D head dim, G head groups

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

WEIGHTS = 7  # of a composition: down, up and gate of the query, of the key, and the base
KEY_WEIGHTS = range(3, 6)
BASE = 6
SHARED_KEYS = 128  # at least, of a share
FORWARD = struct.Struct("=13qd16q2q64q8q")
BACKWARD = struct.Struct("=16q64q5q")
Weights = Sequence[Tensor | None]  # of both compositions


class CallOptions(NamedTuple):
    """Options of a call; window 0 is none."""

    is_causal: bool
    window: int
    scale: float
    num_groups: int


class WorkSplit(NamedTuple):
    """How the work is shared between threads.

    Attributes:
        threads: How many.
        parts: Shares of the queries of one row of the batch.
        slots: What is worked through by one thread after the other, so that it may have one sum.
        shares: Shares of the keys of one row of the batch, where its queries are not cut.
    """

    threads: int
    parts: int
    slots: int
    shares: int = 1


def share(B: int, num_blocks: int, has_sums: bool) -> WorkSplit:
    """Share a call of B rows, each of some blocks of queries, so that all threads are busy to the end.

    Args:
        B: Rows of the batch.
        num_blocks: Blocks that a row's queries are cut into.
        has_sums: Whether every part has sums of its own, of the size of the keys: then few parts.
    """
    threads = torch.get_num_threads()
    wanted = threads if has_sums and B == 1 else 4 * threads
    is_even = threads == 1 or B % threads == 0 or 2 * wanted <= B
    parts = 1 if is_even else max(1, min(-(-wanted // B), num_blocks))
    return WorkSplit(threads, parts, parts * B)


def share_keys(B: int, num_blocks: int, S: int) -> WorkSplit:
    """Share a forward call of B rows: their queries, or keys where those are one block and threads would be idle."""
    split = share(B, num_blocks, has_sums=False)
    shares = min(split.threads // max(B, 1), S // SHARED_KEYS) if num_blocks == 1 else 1
    return split._replace(shares=shares) if shares > 1 else split


def dense(x: Tensor | None) -> Tensor | None:
    """Widen to float32, with no gaps in the last axis."""
    if x is None:
        return None
    if x.is_neg() or torch._is_zerotensor(x):  # whose memory does not hold the numbers
        x = x.clone()
    x = x if x.dtype == torch.float32 else x.float()
    return x if x.stride(-1) == 1 else x.contiguous()


def matrix(x: Tensor) -> tuple[int, ...]:
    """Describe [B, H, tokens, D]."""
    return x.data_ptr(), *x.stride()[:3]


def compositions(weights: Weights) -> list[int]:
    """Describe two compositions."""
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
    """Give a mask, of booleans or numbers, rows of all keys."""
    if mask is None:
        return None
    mask = mask.expand(*mask.shape[:-1], S)
    return mask.contiguous() if mask.dtype == torch.bool else mask.float().contiguous()


def mask_strides(mask: Tensor | None) -> tuple[int, ...]:
    """Describe a mask that may be the same along an axis."""
    if mask is None:
        return (0,) * 4
    strides = zip(mask.shape[:3], mask.stride()[:3], strict=True)
    return mask.data_ptr(), *(0 if size == 1 else stride for size, stride in strides)
