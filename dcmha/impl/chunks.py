"""Splitting a call into chunks, and the layout of a chunk's operands and results for matrix products.

A chunk is a range of batch rows and of queries, divided into blocks. A chunk with one block has the keys from the first
to the last visible to any of its queries. Windowed attention uses chunks with many blocks: each block of Q queries has
the K keys around it, so that few hidden pairs are computed, and all blocks are items of one batched product. The keys
of neighboring blocks overlap; they are a strided view of one buffer of consecutive planes (rows x heads).
"""

# B batch, T query tokens, S key tokens, H heads, D head dim, Q queries and K keys of a block

from typing import NamedTuple

from torch import Tensor

from .masking import key_range

WORKSPACE_MIB = 256  # maximum size of one workspace; the backward pass has two, or several smaller ones
ALIGNMENT = 16  # rows of a workspace are multiples of this many elements, for aligned loads and products
CHUNK_QUERIES = 512  # maximum queries per chunk of causal attention
MIN_QUERIES = 128  # minimum queries per chunk, if the chunk then has at least CHUNK_ELEMENTS
CHUNK_ELEMENTS = 2**26  # queries x visible keys x heads that amortize the launches: about 2 ms on an H100
BLOCK_QUERIES = 128  # queries per block of windowed attention


def round_up(number: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-number // multiple) * multiple


def round_down(number: int, multiple: int) -> int:
    """Round down to a multiple, but at least one multiple."""
    return max(1, number // multiple) * multiple


class Heads(NamedTuple):
    """Heads of the queries.

    Attributes:
        count: H.
        shared: Number of consecutive heads that share one head of the keys and values.
    """

    count: int
    shared: int

    @property
    def of_keys(self) -> int:
        """Number of heads of the keys and values."""
        return self.count // self.shared


class Chunk(NamedTuple):
    """A range of batch rows and of queries, and the keys of its blocks.

    Attributes:
        rows: Range of batch rows.
        queries: Range of queries.
        first_key: Position of the first block's first key; negative if it lies before the first token.
        num_keys: K, keys per block.
        block: Q, queries per block; block n starts n Q queries and keys later.
        num_blocks: Number of blocks with queries.
        plane_blocks: Blocks per plane of the workspace: `num_blocks`, or more to separate the planes.
    """

    rows: slice
    queries: slice
    first_key: int
    num_keys: int
    block: int
    num_blocks: int = 1
    plane_blocks: int = 1

    @property
    def num_rows(self) -> int:
        """Number of batch rows."""
        return self.rows.stop - self.rows.start

    @property
    def num_queries(self) -> int:
        """Number of queries."""
        return self.queries.stop - self.queries.start

    def workspace_size(self, H: int) -> int:
        """Number of elements of a workspace."""
        return self.num_rows * H * self.plane_blocks * self.block * self.num_keys

    def workspace(self, buffer: Tensor, heads: Heads) -> Tensor:
        """View the start of a buffer as the chunk's workspace [rows * H/shared * blocks, shared * Q, K]."""
        return buffer[: self.workspace_size(heads.count)].view(-1, heads.shared * self.block, self.num_keys)

    def of_queries(self, x: Tensor, heads: Heads) -> Tensor:
        """View rows of queries [rows * H/shared * blocks, shared * Q, D] as [rows, H/shared, shared, queries, D]."""
        blocks = x.view(self.num_rows, heads.of_keys, self.plane_blocks, heads.shared, self.block, x.shape[-1])
        return blocks.transpose(2, 3).flatten(3, 4)[:, :, :, : self.num_queries]

    def of_keys(self, x: Tensor, heads: Heads) -> Tensor:
        """View rows of keys [rows * H/shared * blocks, K, D] as [rows * H/shared, blocks, K, D], blocks with queries
        only.
        """
        return x.view(self.num_rows * heads.of_keys, -1, *x.shape[1:])[:, : self.num_blocks]


def chunks(
    B: int, H: int, T: int, S: int, itemsize: int, is_causal: bool, window_size: int, has_bands: bool = True,
    row_multiple: int = 1, *, most_rows: int | None = None, least_per_query: int = 0,
    workspace_mib: float | None = None, queries: int | None = None,
) -> list[Chunk]:  # fmt: skip
    """Split a call so that its workspaces stay within their budget. A window of 0 means none; no pairs give no chunks.

    Args:
        B, H, T, S: Sizes of the call.
        itemsize: Bytes per element of the workspace.
        is_causal, window: As in `composed_attention`.
        has_bands: Whether chunks of windowed attention may have several blocks.
        row_multiple: All chunks but the last have a multiple of this many batch rows.
        most_rows: Maximum batch rows per chunk, at least `row_multiple`; unlimited if None.
        least_per_query: Minimum number of elements to count per query and row, for buffers other than workspaces.
        workspace_mib: Maximum size of a workspace; `WORKSPACE_MIB` if None.
        queries: Maximum queries per chunk if queries see different keys; chosen by the size of the call if None.
    """
    if B * T * S == 0:
        return []
    budget = int((workspace_mib or WORKSPACE_MIB) * 2**20 // itemsize)
    shape = (B, H, T, S, budget, is_causal, window_size, min(row_multiple, B), most_rows or B, least_per_query)
    if queries is None:
        queries = _usual_queries(B, H, S, is_causal, window_size)
    return (_band(*shape) if window_size and has_bands else []) or _rectangles(*shape, queries)


def _usual_queries(B: int, H: int, S: int, is_causal: bool, window_size: int) -> int:
    """Return the queries per chunk if queries see different keys: few, to skip hidden pairs."""
    worth = CHUNK_ELEMENTS // max(1, B * H * min(window_size or S, S // 2))
    if not is_causal:
        return CHUNK_QUERIES
    return min(CHUNK_QUERIES, max(MIN_QUERIES, round_up(worth, MIN_QUERIES)))


def _rectangles(
    B: int, H: int, T: int, S: int, budget: int, is_causal: bool, window_size: int, row_multiple: int, most_rows: int,
    least_per_query: int, queries: int,
) -> list[Chunk]:  # fmt: skip
    """Split into chunks of one block. In a causal chunk the products also compute half a square of hidden pairs."""
    queries = min(T, queries) if is_causal or window_size else T
    widest = min(S, queries + (1 if is_causal else 2) * window_size) if window_size else S
    per_query = max(least_per_query, H * (round_up(widest, ALIGNMENT) + (ALIGNMENT if window_size else 0)))
    queries = max(1, min(queries, budget // (per_query * row_multiple)))
    rows = round_down(min(most_rows, budget // (per_query * queries)), row_multiple)
    plan = []
    for b in range(0, B, rows):
        for i in range(0, T, queries):
            stop = min(T, i + queries)
            first, last = key_range(i, stop, T, S, is_causal, window_size or None)
            first = first // ALIGNMENT * ALIGNMENT
            num_keys = round_up(last - first, ALIGNMENT)
            plan.append(Chunk(slice(b, min(B, b + rows)), slice(i, stop), first, num_keys, stop - i))
    return plan


def _band(
    B: int, H: int, T: int, S: int, budget: int, is_causal: bool, window_size: int, row_multiple: int, most_rows: int,
    least_per_query: int,
) -> list[Chunk]:  # fmt: skip
    """Split windowed attention into chunks of blocks, of several rows or of one; empty if that saves nothing.

    If T = S, keys at the ends of a plane that reach into a neighboring plane are hidden. Otherwise blocks without
    queries separate the planes.
    """
    block, blocks = BLOCK_QUERIES, -(-T // BLOCK_QUERIES)
    before = round_up(window_size - 1, block)
    around = before if is_causal else 2 * before
    apart = around // block
    size = block * max(least_per_query, H * (block + around))
    rows, count, plane_blocks = budget // (size * blocks), blocks, blocks
    if S != T or rows < row_multiple:
        count = min(blocks, budget // (size * row_multiple) - apart)
        plane_blocks = count + apart
        rows = budget // (size * max(1, plane_blocks))
    rows = round_down(min(most_rows, rows), row_multiple)
    saves_nothing = block + around >= min(S, CHUNK_QUERIES + around) or count * block < 2 * around
    if saves_nothing or count < 1 or plane_blocks < 2:
        return []
    plan = []
    for b in range(0, B, rows):
        for n in range(0, blocks, count):
            stop, first_key = min(T, (n + count) * block), n * block + S - T - before
            shape = (first_key, block + around, block, min(count, blocks - n), plane_blocks)
            plan.append(Chunk(slice(b, min(B, b + rows)), slice(n * block, stop), *shape))
    return plan


def query_planes(x: Tensor, chunk: Chunk, heads: Heads) -> Tensor:
    """Arrange queries [B, H, T, D] as planes and blocks [rows * H/shared * blocks, shared * Q, D], padded with zeros.

    Heads that share keys are consecutive within a block, so that they are rows of one product.
    """
    part = x[chunk.rows, :, chunk.queries]
    if chunk.plane_blocks * chunk.block > chunk.num_queries:
        padded = x.new_zeros(*part.shape[:2], chunk.plane_blocks * chunk.block, x.shape[-1])
        padded[:, :, : chunk.num_queries] = part
        part = padded
    blocks = part.view(chunk.num_rows, heads.of_keys, heads.shared, -1, chunk.block, x.shape[-1])
    return blocks.transpose(2, 3).reshape(-1, heads.shared * chunk.block, x.shape[-1])


def key_planes(x: Tensor, chunk: Chunk) -> Tensor:
    """Arrange keys or values [B, H/shared, S, D] likewise as [rows * H/shared * blocks, K, D]; S is padded.

    Keys of neighboring blocks share memory, so the result must not be written to.
    """
    _, _, S, D = x.shape
    if chunk.plane_blocks == 1:
        return x[chunk.rows, :, chunk.first_key : chunk.first_key + chunk.num_keys].flatten(0, 1)
    planes, step = chunk.num_rows * x.shape[1], chunk.plane_blocks * chunk.block
    buffer = x.new_zeros(planes * step + chunk.num_keys - chunk.block, D)
    first, last = _key_range(chunk, S)
    place = buffer.as_strided((planes, last - first, D), (step * D, D, 1), (first - chunk.first_key) * D)
    place.copy_(x[chunk.rows, :, first:last].flatten(0, 1))
    blocks = planes * chunk.plane_blocks
    return buffer.as_strided((blocks, chunk.num_keys, D), (chunk.block * D, D, 1))


def _key_range(chunk: Chunk, S: int) -> tuple[int, int]:
    """Return the range of tokens that are keys of a chunk."""
    stop = chunk.first_key + (chunk.num_blocks - 1) * chunk.block + chunk.num_keys
    return max(0, chunk.first_key), max(0, min(S, stop))


def fold(total: Tensor, parts: Tensor, chunk: Chunk) -> None:
    """Add values of the blocks' keys [planes, blocks, K, X] to those of all keys [planes, S, X]."""
    overlaps = chunk.num_keys // chunk.block
    if chunk.plane_blocks == 1:
        rows = parts.flatten(1, 2)
    else:
        planes, count, _, X = parts.shape
        rows = total.new_zeros(planes, (count + overlaps - 1) * chunk.block, X)
        for shift in range(overlaps):
            place = rows[:, shift * chunk.block : (shift + count) * chunk.block].unflatten(1, (count, chunk.block))
            place += parts[:, :, shift * chunk.block : (shift + 1) * chunk.block]
    first, last = _key_range(chunk, total.shape[1])
    total[:, first:last] += rows[:, first - chunk.first_key : last - chunk.first_key]
