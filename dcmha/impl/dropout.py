"""Which composed weights dropout drops: a function of a seed and of the pair, the same for all implementations.

A number of 32 bits is made of the seed and the places of a weight by the finaliser of MurmurHash3, applied to the plane
(row of the batch and head), the query, the key, and all of them; a weight is dropped where it lies below p 2^32. So
what is dropped depends neither on how a call is cut into chunks nor on the device, and nothing is kept for the backward
pass but the seed.
"""

# B batch, T query tokens, S key tokens, H heads

import torch
from torch import Tensor

FIRST, SECOND = 0x85EBCA6B, 0xC2B2AE35  # factors of the finaliser
HEAD, ROW, COLUMN = 0x9E3779B1, 0x27D4EB2F, 0x165667B1  # odd numbers that spread planes, queries and keys
WORD = 2**32


def draw_seed(device: torch.device) -> Tensor:
    """Draw a seed [2], two words in int64, from the device's generator of random numbers."""
    return torch.randint(WORD, (2,), device=device)


def threshold_of(dropout_p: float) -> int:
    """Return the number below which a weight is dropped."""
    return min(WORD - 1, round(dropout_p * WORD))


def scramble(x: Tensor) -> Tensor:
    """Finalise words of 32 bits, held in int64."""
    x = ((x ^ (x >> 16)) * FIRST) & (WORD - 1)
    x = ((x ^ (x >> 13)) * SECOND) & (WORD - 1)
    return x ^ (x >> 16)


def drop(
    weights: Tensor, seed: Tensor, dropout_p: float, first_query: int | Tensor = 0, first_key: int | Tensor = 0
) -> Tensor:
    """Drop composed weights [B, H, T, S] with a probability, and scale up the others.

    Args:
        weights: Of a block of queries and keys.
        seed: As `draw_seed` makes it.
        dropout_p: The probability.
        first_query: Number of the block's first query.
        first_key: Number of the block's first key.
    """
    B, H, T, S = weights.shape
    planes, queries, keys = (torch.arange(n, device=weights.device) for n in (B * H, T, S))
    plane = scramble((planes * HEAD & (WORD - 1)) ^ seed[0])
    row = scramble(plane[:, None] ^ ((queries + first_query) * ROW & (WORD - 1)) ^ seed[1])  # [B H, T]
    column = scramble((keys + first_key) * COLUMN & (WORD - 1))
    kept = scramble(row[:, :, None] ^ column) >= threshold_of(dropout_p)
    return torch.where(kept.view(B, H, T, S), weights / (1.0 - dropout_p), 0.0)
