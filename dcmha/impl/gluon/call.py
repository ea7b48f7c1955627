"""A call of composed attention for the kernels: sizes, packed weights, chunks, views and launches."""

# B batch, T query tokens, S key tokens, H heads, D head dim, R compose rank, G head groups

import math
from functools import cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from ...weights import ComposeWeights
from .. import chunks
from ..chunks import Chunk, Heads, key_planes, query_planes
from . import kernels, packing
from .indexing import KernelConfig, Packed, Sizes, program_queries
from .launch import launch
from .masking import Masks
from .mixing import ComposeSpec

DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
NOTHING = ComposeWeights()
PROGRAMS = 4096  # target programs of a kernel: two waves on an H100
KEY_PROGRAMS = 2112  # target programs of a key-side kernel, two waves; with at least half as many, tiles are not split
SPLIT_QUERIES = 64  # minimum queries of each program of a key-side kernel if programs share a tile of keys
SHORT_ROW = 640  # maximum visible keys per query for which the L1 cache holds the active rows
SINGLE_QUERY = (kernels.post_gradients, kernels.pre_gradients)  # one query per program, for enough programs
MEMORY_SHARE = 64  # a workspace is 1/64 of the GPU's memory: 1.25 GiB of 80
MAX_MIB = 2048  # maximum workspace: kernels index its elements with 32 bits
MAX_SETS = 65535  # maximum sets per chunk: limit of a grid's second axis


def slots_of_group(heads: int) -> int:
    """Number of slots for the heads of a group: 4, 8, or 16 per block."""
    return 4 if heads <= 4 else 8 if heads <= 8 else -(-heads // 16) * 16


def statistics_shape(q: Tensor, num_groups: int) -> tuple[int, int, int]:
    """Return the shape [sets, T, 16 BLOCKS] of numbers of each query and slot, for queries [B, H, T, D]."""
    B, H, T, _ = q.shape
    slots = slots_of_group(H // num_groups)
    return -(-B * num_groups // max(1, 16 // slots)), T, max(16, slots)


def chunk_queries(num_sets: int) -> int:
    """Return the queries per chunk of causal attention: enough for `PROGRAMS` programs."""
    return chunks.round_up(max(chunks.MIN_QUERIES, PROGRAMS // max(1, num_sets)), 16)


def lse_shape(q: Tensor, num_groups: int, mask: Tensor | None) -> tuple[int, int, int, int]:
    """Return the shape of log-sum-exps, [1, sets, T, 16 BLOCKS]; with a floating mask 2, for `Masks.shifts`."""
    return 2 if mask is not None and mask.is_floating_point() else 1, *statistics_shape(q, num_groups)


@cache
def workspace_mib(device: torch.device) -> float:
    """Return the size of a workspace, larger on devices with much memory, for long rows."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return chunks.WORKSPACE_MIB
    memory = torch.cuda.get_device_properties(device).total_memory
    return min(MAX_MIB, max(chunks.WORKSPACE_MIB, memory / 2**20 / MEMORY_SHARE))


class Attention:
    """A call of composed attention: its sizes, packed weights, and chunks.

    Args:
        q: Queries [B, H, T, D], contiguous.
        k: Keys [B, H / shared, S, D], contiguous.
        v: Values, same shape.
        pre: Composition of the scores.
        post: Composition of the weights.
        masks: Masks, documents and dropout.
        is_causal: As in `composed_attention`.
        window: As in `composed_attention`; 0 for none.
        scale: As in `composed_attention`.
        num_groups: As in `composed_attention`.
        mask_shape: Shape of a mask that requires a gradient; None otherwise.
        lse: Log-sum-exps that the forward pass returned, of `lse_shape`; allocated if None.

    Raises:
        ValueError: If a query's scores are too many for a workspace.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, pre: ComposeWeights | None, post: ComposeWeights | None, masks: Masks,
        is_causal: bool, window_size: int, scale: float, num_groups: int, mask_shape: tuple[int, ...] | None = None,
        lse: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.q, self.k, self.v, self.scale, self.mask_shape = q, k, v, scale, mask_shape
        if lse is None:
            lse = q.new_empty(lse_shape(q, num_groups, masks.pairs), dtype=torch.float32)
        self.lse = lse
        self.masks = masks._replace(shifts=lse[1]) if len(lse) == 2 else masks
        self.B, H, self.T, self.D = q.shape
        self.S, self.window_size = k.shape[2], min(window_size, self.T + k.shape[2])
        self.heads = Heads(H, H // k.shape[1])
        slots = slots_of_group(H // num_groups)
        self.pack, self.blocks = max(1, 16 // slots), max(1, slots // 16)  # groups and blocks of heads of a tile
        self.num_sets = -(-self.B * num_groups // self.pack)
        multiple = self.pack // math.gcd(num_groups, self.pack)
        has_bands = window_size > 0 and mask_shape is None and self.T <= self.S and (self.S - self.T) % 16 == 0
        num_visible = min(self.S, (self.window_size if is_causal else 2 * self.window_size) or self.S)
        self.is_short = self.blocks == 1 and mask_shape is None and num_visible <= SHORT_ROW
        self.plan = chunks.chunks(
            self.B, H, self.T, self.S, q.element_size(), is_causal, self.window_size, has_bands, multiple,
            most_rows=MAX_SETS * self.pack // num_groups,
            least_per_query=-(-num_groups // self.pack) * 512 * self.blocks**2,  # a float32 matrix of each set
            workspace_mib=workspace_mib(q.device) / (2 if self.is_short or self.blocks > 1 else 1),
            queries=chunk_queries(self.num_sets),
        )  # fmt: skip
        self.workspace_size = max((chunk.workspace_size(H) for chunk in self.plan), default=0)
        if self.workspace_size >= 2**31:
            raise ValueError(f"k has S = {self.S} tokens, too many for the kernels; use impl='compiled'.")
        band = self.plan[0].block if self.plan and self.plan[0].plane_blocks > 1 else 0
        self.kind = KernelConfig(
            slots, H // num_groups, self.blocks, num_groups, H, self.heads.shared, is_causal, window_size > 0,
            masks.starts is not None, masks.kind, mask_shape is not None, masks.seed is not None, band, False, False,
            DTYPES[q.dtype],
        )  # fmt: skip
        self.pre, self.post = map(with_dense_base, (pre or NOTHING, post or NOTHING))
        self.specs = tuple(map(spec_of, (self.pre, self.post)))
        self.packed = self._pack()

    def _pack(self) -> tuple[Packed, Packed]:
        """Pack the weights of all sides in one launch."""
        sides = (self.pre.query, self.pre.key, self.post.query, self.post.key)
        ranks = tuple(packing.ranks_of(side, bool(n % 2)) for n, side in enumerate(sides))
        counts = [2 * rank.RANK + rank.GATE for rank in ranks]
        tiles, width = -(-self.S // 16), 16 * self.blocks
        shapes = [(self.T, width), (tiles, 16 * width)] * 2
        outs = tuple(
            None if count == 0 else self.q.new_empty(self.num_sets, tokens, count, each)
            for count, (tokens, each) in zip(counts, shapes, strict=True)
        )
        if any(counts):
            sizes = Sizes(self.B * self.kind.NUM_GROUPS, 0, self.T, self.S, 0, self.T, 1, 0, 16, 0, 1)
            grid = (-(-max(self.T, self.S) // 16) * self.num_sets, 4, 1)
            given = (tuple(map(packing.side_of, sides)), outs, sizes)
            launch(packing.pack_weights, grid, given, (self.kind, *ranks), self.q.device)
        return Packed(outs[0], outs[1], self.pre.base), Packed(outs[2], outs[3], self.post.base)

    def sizes(self, chunk: Chunk, splits: int = 1) -> Sizes:
        """Return the `Sizes` of a chunk."""
        return Sizes(
            chunk.num_rows * self.kind.NUM_GROUPS, chunk.rows.start, self.T, self.S, chunk.queries.start,
            chunk.num_queries, chunk.plane_blocks, chunk.first_key, chunk.num_keys, self.window_size, splits,
        )  # fmt: skip

    def run(self, kernel, chunk: Chunk, arguments: tuple) -> None:
        """Launch a query-side kernel on a chunk."""
        given = (*arguments, *self.packed, self.masks, self.sizes(chunk))
        per_program = 1 if kernel in SINGLE_QUERY else program_queries(self.blocks)
        grid = (-(-chunk.num_queries // per_program), self.sets(chunk), 1)
        launch(kernel, grid, given, (self.kind, *self.specs), self.q.device)

    def run_key_side(self, kernel, chunk: Chunk, arguments: tuple, constants: tuple, splits: int) -> None:
        """Launch a key-side kernel on a chunk; `splits` programs share a tile of keys."""
        given = (*arguments, self.masks, self.sizes(chunk, splits))
        kind = self.kind._replace(ADDS=splits == 1 and not self.covers_keys, SPLITS=splits > 1)
        grid = (self.key_tiles(chunk) * self.sets(chunk) * splits, 1, 1)
        launch(kernel, grid, given, (kind, *constants), self.q.device)

    def sets(self, chunk: Chunk) -> int:
        """Number of slot sets of a chunk."""
        return -(-chunk.num_rows * self.kind.NUM_GROUPS // self.pack)

    def key_range(self, chunk: Chunk) -> tuple[int, int]:
        """Return the range of tokens that are keys of a chunk."""
        last = chunk.first_key + (chunk.num_blocks - 1) * chunk.block + chunk.num_keys
        return max(0, chunk.first_key), min(self.S, last)

    def key_tiles(self, chunk: Chunk) -> int:
        """Number of tiles of 16 keys of a chunk."""
        first, last = self.key_range(chunk)
        return -(-last // 16) - first // 16

    def key_splits(self, chunk: Chunk) -> int:
        """Number of programs that share the queries of a tile of keys, to fill the GPU."""
        programs = self.key_tiles(chunk) * self.sets(chunk)
        if self.kind.BAND > 0 or programs >= KEY_PROGRAMS // 2:
            return 1
        return max(1, min(-(-KEY_PROGRAMS // programs), chunk.num_queries // SPLIT_QUERIES))

    @property
    def covers_keys(self) -> bool:
        """Whether one chunk has all queries of a batch row, so that it computes the full gradients of the keys."""
        has_all = self.kind.BAND == 0 and all(c.first_key <= 0 and self.real_keys(c) == self.S for c in self.plan)
        return has_all and len({c.rows.start for c in self.plan}) == len(self.plan) > 0

    def workspace(self) -> Tensor:
        """Allocate the largest chunk."""
        return self.q.new_empty(self.workspace_size)

    def statistics(self) -> Tensor:
        """Allocate a number of each query and slot."""
        return self.q.new_empty(statistics_shape(self.q, self.kind.NUM_GROUPS), dtype=torch.float32)

    def queries(self, x: Tensor, chunk: Chunk) -> Tensor:
        """Queries [B, H, T, D] of a chunk as [rows H / shared blocks, shared Q, D]; a view if possible."""
        if self.is_plain(chunk):
            return x[chunk.rows].flatten(0, 1)[:, chunk.queries]
        return query_planes(x, chunk, self.heads)

    def keys(self, x: Tensor, chunk: Chunk) -> Tensor:
        """Keys or values [B, H / shared, S, D] of a chunk as [rows H / shared blocks, K, D]; a view if possible."""
        if chunk.plane_blocks == 1:
            return x[chunk.rows].flatten(0, 1)[:, chunk.first_key : chunk.first_key + self.real_keys(chunk)]
        return key_planes(x, chunk)

    def is_plain(self, chunk: Chunk) -> bool:
        """Whether a chunk is one block whose queries are consecutive rows of the call."""
        return chunk.plane_blocks == 1 and self.heads.shared == 1

    def real_keys(self, chunk: Chunk) -> int:
        """Number of keys of a chunk with one block; in chunks with several blocks, missing keys are zeros."""
        return chunk.num_keys if chunk.plane_blocks > 1 else min(chunk.num_keys, self.S - chunk.first_key)

    def scores(self, buffer: Tensor, chunk: Chunk) -> Tensor:
        """View the start of a buffer as a chunk's workspace, without padding columns."""
        return chunk.workspace(buffer, self.heads)[:, :, : self.real_keys(chunk)]


def with_dense_base(weights: ComposeWeights) -> ComposeWeights:
    """Make the base contiguous."""
    return weights if weights.base is None else weights._replace(base=weights.base.contiguous())


def spec_of(weights: ComposeWeights) -> ComposeSpec:
    """Describe the branches of a composition."""
    query, key = (packing.ranks_of(side, False) for side in (weights.query, weights.key))
    return ComposeSpec(query.RANK, query.GATE, key.RANK, key.GATE, int(weights.base is not None))
