"""Distribution of a call over the threads."""

# B batch, S key tokens

from typing import NamedTuple

import torch

SHARED_KEYS = 128  # minimum keys per share


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
