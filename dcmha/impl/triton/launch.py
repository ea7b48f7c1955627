"""Launching the kernels on the chunks of a call, and summing the partial results of their programs."""

# B batch, T query tokens, S key tokens, H heads, R compose rank, G head groups

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..chunks import Chunk, Heads, fold
from . import kernels, softmax_stats
from .head_mixing import KernelConfig
from .indexing import Sizes
from .packing import CallOptions, ComposeOperands, MaskOperands, Unpacked, drop_sizes, kernel_config

FILL_PROGRAMS = 528  # programs that fill a GPU: four on each multiprocessor of an H100
SPLIT_TOKENS = 256  # minimum tokens of a loop that is split between programs


class Tile(NamedTuple):
    """Tile size and resources of a kernel's programs.

    Attributes:
        queries: BLOCK_M.
        keys: BLOCK_N.
        warps: Warps per program.
        stages: Pipeline stages of loads.
        registers: Maximum registers per thread; None for the compiler's choice.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None


TILES = {  # the fastest on an H100 (benchmarks/results/kernels_log.md)
    "row_statistics": Tile(8, 32, 4, 1, 128),
    "composed_weights": Tile(8, 16, 4, 1, 128),
    "post_gradients": Tile(8, 16, 4, 1, 128),
    "pre_gradients": Tile(2, 16, 2, 2, 128),
    "key_gradients": Tile(16, 8, 4, 1, 168),
}
MASKED_TILES = TILES | {  # masks and dropout need more registers
    "composed_weights": Tile(8, 16, 4, 1),
    "pre_gradients": Tile(8, 16, 4, 1),
}
TWO_BLOCK_TILES = {  # up to 32 heads per group
    "row_statistics": Tile(8, 16, 4, 1),
    "composed_weights": Tile(8, 16, 4, 1),
    "post_gradients": Tile(4, 16, 4, 1),
    "pre_gradients": Tile(4, 16, 4, 1),
    "key_gradients": Tile(16, 8, 8, 1),
}
WIDE_TILES = TWO_BLOCK_TILES | {  # up to 64 heads per group
    "row_statistics": Tile(4, 16, 4, 1),
    "composed_weights": Tile(4, 16, 4, 1),
    "key_gradients": Tile(16, 4, 4, 1),
}
FLOAT32_TILES = {  # float32 products need more registers
    "row_statistics": Tile(8, 16, 4, 1),
    "composed_weights": Tile(4, 16, 8, 1),
    "post_gradients": Tile(4, 16, 4, 1),
    "pre_gradients": Tile(4, 16, 8, 1),
    "key_gradients": Tile(16, 4, 8, 1),
}
FLOAT32_WIDE_TILES = {
    "row_statistics": Tile(2, 16, 4, 1),
    "composed_weights": Tile(2, 16, 4, 1),
    "post_gradients": Tile(2, 16, 4, 1),
    "pre_gradients": Tile(2, 16, 4, 1),
    "key_gradients": Tile(16, 4, 8, 1),
}
EMPTY = softmax_stats.EMPTY.value


def tile_of(name: str, itemsize: int, kind: KernelConfig) -> Tile:
    """Return the tile of a kernel, for workspaces of 2 or 4 bytes per element."""
    if itemsize == 4:
        return (FLOAT32_TILES if kind.BLOCKS == 1 else FLOAT32_WIDE_TILES)[name]
    if kind.BLOCKS > 1:
        return (TWO_BLOCK_TILES if kind.BLOCKS == 2 else WIDE_TILES)[name]
    return (MASKED_TILES if kind.MASK or kind.HAS_DROPOUT else TILES)[name]


class KernelLauncher:
    """Launches the kernels of a call on its chunks."""

    def __init__(
        self, q: Tensor, shape: tuple[int, int], operands: ComposeOperands | Unpacked, mask_operands: MaskOperands,
        options: CallOptions,
        mask_gradient: bool = False,
    ) -> None:  # fmt: skip
        """Prepare a call with queries `q`; `shape` is the number of heads and tokens of the keys."""
        self.q, (num_kv_heads, self.S), self.operands, self.options = q, shape, operands, options
        self.heads = Heads(q.shape[1], q.shape[1] // num_kv_heads)
        self.mask_operands, self.kind = mask_operands, kernel_config(q, mask_operands, options, mask_gradient)

    def run(self, name: str, chunk: Chunk, tensors: list[Tensor | None], num_splits: int = 1) -> None:
        """Launch one kernel; `tensors` are those of its signature without compositions and masks."""
        tile = tile_of(name, self.q.element_size(), self.kind)
        compositions = ("pre",) if name == "row_statistics" else ("pre", "post")
        getattr(kernels, name)[(self.num_programs(name, chunk) * num_splits,)](
            *tensors,
            **{composition: self.operands.packed(composition) for composition in compositions},
            masks=self.mask_operands.masks(),
            **self.sizes(chunk, num_splits)._asdict(),
            num_keys=chunk.num_keys,
            KIND=self.kind,
            **{composition.upper(): self.operands.form(composition, self.kind.BLOCKS) for composition in compositions},
            BLOCK_M=tile.queries,
            BLOCK_N=tile.keys,
            **launch_options(self.q.is_cuda, tile.warps, tile.stages, tile.registers),
        )

    def sizes(self, chunk: Chunk, num_splits: int) -> Sizes:
        """Sizes of a chunk, for the kernels."""
        mask_row, mask_head, mask_query, mask_key = self.mask_operands.strides
        return Sizes(
            num_instances=chunk.num_rows * self.options.num_groups,
            num_groups=self.options.num_groups,
            H=self.heads.count,
            shared=self.heads.shared,
            row0=chunk.rows.start,
            T=self.q.shape[2],
            S=self.S,
            query0=chunk.queries.start,
            num_queries=chunk.num_queries,
            block=chunk.block,
            num_blocks=chunk.num_blocks,
            plane_blocks=chunk.plane_blocks,
            first_key=chunk.first_key,
            window_size=self.options.window_size,
            num_splits=num_splits,
            mask_row=mask_row,
            mask_head=mask_head,
            mask_query=mask_query,
            mask_key=mask_key,
            **drop_sizes(self.options.dropout_p),
        )

    def num_programs(self, name: str, chunk: Chunk) -> int:
        """Number of programs of a kernel without splitting loops."""
        tile = tile_of(name, self.q.element_size(), self.kind)
        by_keys = name == "key_gradients"
        tiles = triton.cdiv(chunk.num_keys, tile.keys) if by_keys else triton.cdiv(chunk.block, tile.queries)
        return self.num_slot_sets(chunk) * chunk.num_blocks * tiles

    def num_slot_sets(self, chunk: Chunk) -> int:
        """Number of slot sets for the head groups of a chunk."""
        return triton.cdiv(chunk.num_rows * self.options.num_groups, self._instances)

    @property
    def _instances(self) -> int:
        """Head groups per program."""
        return max(1, 16 // self.kind.GROUP_SLOTS)

    def num_splits(self, name: str, chunk: Chunk) -> int:
        """Number of programs that share a loop, so that few long rows also fill the GPU."""
        length = chunk.block if name == "key_gradients" else chunk.num_keys
        return max(1, min(FILL_PROGRAMS // self.num_programs(name, chunk), length // SPLIT_TOKENS))

    def statistics(self, chunk: Chunk, num_splits: int) -> Tensor:
        """Allocate one number per query and head for each split."""
        size = (num_splits, chunk.num_rows, self.heads.count, chunk.num_queries)
        return self.q.new_empty(size, dtype=torch.float32)

    def row_statistics(self, chunk: Chunk, x: Tensor, lse: Tensor) -> None:
        """Launch the kernel and write the base-2 log-sum-exp of its chunk to `lse` [B, H, T]."""
        num_splits = self.num_splits("row_statistics", chunk)
        parts = self.statistics(chunk, num_splits)
        self.run("row_statistics", chunk, [x, parts], num_splits)
        lse[chunk.rows, :, chunk.queries] = parts[0] if num_splits == 1 else _log_add(parts)

    def composed_weights(self, chunk: Chunk, x: Tensor, lse: Tensor) -> None:
        """Launch the kernel: scores to composed weights, in place."""
        self.run("composed_weights", chunk, [x, lse], self.num_splits("composed_weights", chunk))

    def post_gradients(
        self, chunk: Chunk, x: Tensor, da: Tensor, lse: Tensor, delta: Tensor, grads: ComposeOperands
    ) -> None:
        """Launch the kernel; write to `delta` and `grads.post_query`, add to `grads.post_base`."""
        num_splits = self.num_splits("post_gradients", chunk)
        parts = self.statistics(chunk, num_splits)
        before = [x, da, lse, parts]
        self._run_with_gradients("post_gradients", chunk, before, num_splits, grads.post_query, grads.post_base)
        delta[chunk.rows, :, chunk.queries] = parts.sum(0)

    def pre_gradients(
        self,
        chunk: Chunk,
        x: Tensor,
        da: Tensor,
        dy: Tensor | None,
        lse: Tensor,
        delta: Tensor,
        grads: ComposeOperands,
    ) -> None:
        """Launch the kernel; write to `grads.pre_query` and `dy`, add to `grads.pre_base`."""
        num_splits = self.num_splits("pre_gradients", chunk)
        before = [x, da, dy, lse, delta]
        self._run_with_gradients("pre_gradients", chunk, before, num_splits, grads.pre_query, grads.pre_base)

    def _run_with_gradients(
        self,
        name: str,
        chunk: Chunk,
        tensors: list[Tensor | None],
        num_splits: int,
        d_weights: Tensor | None,
        d_base: Tensor | None,
    ) -> None:
        """Launch a kernel that stores gradients per split, and those of a base per program; sum them."""
        parts = sums = None
        if d_weights is not None:
            parts = d_weights.new_empty(num_splits, chunk.num_rows, chunk.num_queries, *d_weights.shape[2:])
        if d_base is not None:
            width = 16 * self.kind.BLOCKS
            sums = d_base.new_empty(self.num_programs(name, chunk) * num_splits, width, width)
        self.run(name, chunk, [*tensors, parts, sums], num_splits)
        if d_weights is not None:
            d_weights[chunk.rows, chunk.queries] = parts.sum(0)
        if d_base is not None:
            self._add_base(chunk, sums, d_base)

    def _add_base(self, chunk: Chunk, sums: Tensor, d_base: Tensor) -> None:
        """Add the partial sums of all programs, block matrices over slots, to the gradient of a base."""
        size, count, heads = self.kind.GROUP_SLOTS, self._instances, self.kind.HEADS
        blocks = sums.view(self.num_slot_sets(chunk), -1, count, size, count, size).sum(1)
        instances = blocks.diagonal(dim1=1, dim2=3).movedim(-1, 1).flatten(0, 1)
        real = instances[: chunk.num_rows * self.options.num_groups, :heads, :heads]
        d_base += real.unflatten(0, (chunk.num_rows, -1)).sum(0)

    def key_gradients(
        self, chunk: Chunk, x: Tensor, da: Tensor, lse: Tensor, delta: Tensor, grads: ComposeOperands
    ) -> None:
        """Launch the kernel; add to `grads.pre_key` and `grads.post_key`."""
        totals = [grads.pre_key, grads.post_key]
        if totals == [None, None]:
            return
        num_splits = self.num_splits("key_gradients", chunk)
        size = (num_splits, chunk.num_rows, chunk.num_blocks, chunk.num_keys)
        parts = [None if total is None else total.new_empty(*size, *total.shape[2:]) for total in totals]
        self.run("key_gradients", chunk, [x, da, lse, delta, *parts], num_splits)
        for total, part in zip(totals, parts, strict=True):
            if total is not None:
                fold(total[chunk.rows].flatten(2), part.sum(0).flatten(3), chunk)


def _log_add(parts: Tensor) -> Tensor:
    """Base-2 log-sum-exp over splits [splits, ...]; EMPTY if all are -EMPTY, i.e. no key is visible."""
    top = parts.amax(0)
    return torch.where(top > -EMPTY / 2, top + (parts - top).exp2().sum(0).log2(), EMPTY)


def launch_options(is_cuda: bool, warps: int, stages: int, registers: int | None = None) -> dict[str, object]:
    """Return the options of a launch; the interpreter accepts two of them.

    Fused multiply-add is requested explicitly, because its default in Triton may change.
    """
    options = {"num_warps": warps, "num_stages": stages}
    if not is_cuda:
        return options
    return options | {"enable_fp_fusion": True} | ({} if registers is None else {"maxnreg": registers})
