"""Dropout of composed weights as a function of a seed and the pair, identical in all implementations.

The finalizer of MurmurHash3 hashes the seed and the position of a weight - plane (batch row and head), query, key - to
32 bits; the weight is dropped if the hash is below p 2^32. Therefore the dropped weights depend neither on the chunks
of a call nor on the device, and only the seed is stored for the backward pass.
"""

# B batch, T query tokens, S key tokens, H heads

import torch
from torch import Tensor

FIRST, SECOND = 0x85EBCA6B, 0xC2B2AE35  # factors of the finalizer
HEAD, ROW, COLUMN = 0x9E3779B1, 0x27D4EB2F, 0x165667B1  # odd numbers that spread planes, queries and keys
WORD = 2**32


def draw_seed(device: torch.device) -> Tensor:
    """Draw a seed [2], two words in int64, from the device's generator of random numbers."""
    return torch.randint(WORD, (2,), device=device)


def threshold_of(dropout_p: float) -> int:
    """Return the hash value below which a weight is dropped."""
    return min(WORD - 1, round(dropout_p * WORD))


def scramble(x: Tensor) -> Tensor:
    """Apply the finalizer to words of 32 bits, stored in int64."""
    x = ((x ^ (x >> 16)) * FIRST) & (WORD - 1)
    x = ((x ^ (x >> 13)) * SECOND) & (WORD - 1)
    return x ^ (x >> 16)


def drop(
    weights: Tensor, seed: Tensor, dropout_p: float, first_query: int | Tensor = 0, first_key: int | Tensor = 0
) -> Tensor:
    """Apply dropout to composed weights [B, H, T, S].

    Args:
        weights: Composed weights of a block of queries and keys.
        seed: Seed from `draw_seed`.
        dropout_p: Probability of dropping a weight.
        first_query: Index of the block's first query.
        first_key: Index of the block's first key.
    """
    B, H, T, S = weights.shape
    planes, queries, keys = (torch.arange(n, device=weights.device) for n in (B * H, T, S))
    plane = scramble((planes * HEAD & (WORD - 1)) ^ seed[0])
    row = scramble(plane[:, None] ^ ((queries + first_query) * ROW & (WORD - 1)) ^ seed[1])  # [B H, T]
    column = scramble((keys + first_key) * COLUMN & (WORD - 1))
    kept = scramble(row[:, :, None] ^ column) >= threshold_of(dropout_p)
    return torch.where(kept.view(B, H, T, S), weights / (1.0 - dropout_p), 0.0)
