"""Forward and backward over chunks: library products on a reused workspace, and the kernels that mix heads on it.

For each chunk of rows of the batch and queries, and the keys they may see:

    forward     x = scale q k^T;  row_statistics;  composed_weights;  o = x v
    backward    x = scale q k^T;  da = do v^T;  post_gradients;  key_gradients;  pre_gradients;
                dq = scale da k;  dk += scale da^T q;  dv += x^T do
"""

# B batch, T query tokens, S key tokens, H heads, D head dim, R compose rank, G head groups

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from . import kernels
from .chunks import ALIGNMENT, Chunk, chunks, fold, key_planes, query_planes, round_up

FILL_PROGRAMS = 528  # programs that fill a GPU: four on each multiprocessor of an H100
SPLIT_TOKENS = 256  # fewest tokens of a loop that is split between programs
# Queries and keys of a tile, warps, stages of loads: what spills least (tests/dcmha/triton/test_resources.py).
TILES = {
    "row_statistics": (8, 32, 4, 2),
    "composed_weights": (16, 16, 4, 2),
    "post_gradients": (8, 16, 4, 2),
    "pre_gradients": (8, 16, 4, 2),
    "key_gradients": (16, 8, 4, 1),
}
MASKED_TILES = TILES | {  # masks of keys take more registers
    "composed_weights": (8, 16, 4, 1),
    "pre_gradients": (8, 16, 4, 1),
}
FLOAT32_TILES = {  # products in float32 take more registers
    "row_statistics": (8, 16, 4, 1),
    "composed_weights": (4, 16, 8, 1),
    "post_gradients": (4, 16, 4, 1),
    "pre_gradients": (4, 16, 8, 1),
    "key_gradients": (16, 4, 8, 1),
}
EMPTY = kernels.EMPTY.value


def tile_of(name: str, itemsize: int, has_mask: bool) -> tuple[int, int, int, int]:
    """Return a kernel's tile (queries, keys), warps and stages, for workspaces of 2 or 4 bytes an element."""
    if itemsize == 4:
        return FLOAT32_TILES[name]
    return (MASKED_TILES if has_mask else TILES)[name]


def slots_of_group(heads: int) -> int:
    """Return how many slots hold the heads of a group: 4, 8 or 16."""
    return max(4, triton.next_power_of_2(heads))


class Operands(NamedTuple):
    """The packed weights [B, T or S, 2R + gate, H] of both compositions and sides, and their bases [G, H/G, H/G].

    The kernels see GROUP_SLOTS columns for each group, some of them empty, and bases as they are.
    """

    pre_query: Tensor | None
    pre_key: Tensor | None
    pre_base: Tensor | None
    post_query: Tensor | None
    post_key: Tensor | None
    post_base: Tensor | None

    def form(self, composition: str) -> kernels.Form:
        """Tell the kernels which branches "pre" or "post" has."""
        query, key, base = (getattr(self, f"{composition}_{part}") for part in ("query", "key", "base"))
        return kernels.Form(*rank_and_gate(query), *rank_and_gate(key), int(base is not None))

    def to_columns(self, num_groups: int) -> "Operands":
        """Add empty columns [B, T or S, 2R + gate, G GROUP_SLOTS], for aligned loads."""

        def pad(w: Tensor | None) -> Tensor | None:
            if w is None:
                return None
            if w.dim() == 3:
                return w.contiguous()
            groups = w.unflatten(3, (num_groups, -1))
            return F.pad(groups, (0, slots_of_group(groups.shape[4]) - groups.shape[4])).flatten(3).contiguous()

        return Operands(*map(pad, self))

    def from_columns(self, num_groups: int, heads: int) -> "Operands":
        """Leave the empty columns of gradients out again."""

        def cut(w: Tensor | None) -> Tensor | None:
            if w is None or w.dim() == 3:
                return w
            return w.unflatten(3, (num_groups, -1))[..., :heads].flatten(3).contiguous()

        return Operands(*map(cut, self))


def rank_and_gate(packed: Tensor | None) -> tuple[int, int]:
    """Tell the rank of packed weights [B, T or S, 2R + gate, H], and whether they have a gate (1 or 0)."""
    rank, gate = divmod(0 if packed is None else packed.shape[2], 2)
    return rank, gate


@dataclass(frozen=True)
class Options:
    """What a call is, apart from its tensors; a window of 0 is none."""

    is_causal: bool
    window: int
    scale: float
    num_groups: int


class Mixer:
    """Launches the kernels of a call on its chunks."""

    def __init__(self, q: Tensor, S: int, operands: Operands, key_mask: Tensor | None, options: Options) -> None:
        self.q, self.S, self.operands, self.key_mask, self.options = q, S, operands, key_mask, options
        self.heads = q.shape[1] // options.num_groups
        self.slots_of_group = slots_of_group(self.heads)
        self.dummy = q.new_empty(1, dtype=torch.float32)
        self.kind = kernels.Kind(
            GROUP_SLOTS=self.slots_of_group,
            HEADS=self.heads,
            IS_CAUSAL=options.is_causal,
            HAS_WINDOW=options.window > 0,
            HAS_MASK=key_mask is not None,
            DOT=_dot_dtype(q),
        )

    def run(self, name: str, chunk: Chunk, tensors: list[Tensor | None], num_splits: int = 1) -> None:
        """Launch one kernel; `tensors` are those of its signature that come before the mask of keys."""
        query_tile, key_tile, num_warps, num_stages = tile_of(name, self.q.element_size(), self.key_mask is not None)
        compositions = ("PRE",) if name == "row_statistics" else ("PRE", "POST")
        getattr(kernels, name)[(self.num_programs(name, chunk) * num_splits,)](
            *(self.dummy if t is None else t for t in (*tensors, self.key_mask)),
            **self.sizes(chunk, num_splits)._asdict(),
            num_keys=chunk.num_keys,
            KIND=self.kind,
            **{composition: self.operands.form(composition.lower()) for composition in compositions},
            BQ=query_tile,
            BK=key_tile,
            num_warps=num_warps,
            num_stages=num_stages,
            **_fused_multiply_add(self.q),
        )

    def sizes(self, chunk: Chunk, num_splits: int) -> kernels.Sizes:
        """Tell a kernel what the chunk is."""
        return kernels.Sizes(
            num_instances=chunk.num_rows * self.options.num_groups,
            num_groups=self.options.num_groups,
            H=self.q.shape[1],
            row0=chunk.rows.start,
            T=self.q.shape[2],
            S=self.S,
            query0=chunk.queries.start,
            num_queries=chunk.num_queries,
            block=chunk.block,
            num_blocks=chunk.num_blocks,
            plane_blocks=chunk.plane_blocks,
            first_key=chunk.first_key,
            window=self.options.window,
            num_splits=num_splits,
        )

    def num_programs(self, name: str, chunk: Chunk) -> int:
        """Count the programs of a kernel whose loops are not split."""
        query_tile, key_tile, *_ = tile_of(name, self.q.element_size(), self.key_mask is not None)
        by_keys = name == "key_gradients"
        tiles = triton.cdiv(chunk.num_keys, key_tile) if by_keys else triton.cdiv(chunk.block, query_tile)
        return self.num_slot_sets(chunk) * chunk.num_blocks * tiles

    def num_slot_sets(self, chunk: Chunk) -> int:
        """Count the sets of 16 slots that hold a chunk's groups of heads."""
        return triton.cdiv(chunk.num_rows * self.options.num_groups, 16 // self.slots_of_group)

    def num_splits(self, name: str, chunk: Chunk) -> int:
        """Tell between how many programs a loop is split, so that few long rows fill a GPU too."""
        length = chunk.block if name == "key_gradients" else chunk.num_keys
        return max(1, min(FILL_PROGRAMS // self.num_programs(name, chunk), length // SPLIT_TOKENS))

    def statistics(self, chunk: Chunk, num_splits: int) -> Tensor:
        """Make room for a number per query and head of each split."""
        return self.dummy.new_empty(num_splits, chunk.num_rows, self.q.shape[1], chunk.num_queries)

    def row_statistics(self, chunk: Chunk, x: Tensor, log_sum: Tensor) -> None:
        """Launch the kernel and put the base-2 log-sums of its chunk into `log_sum` [B, H, T]."""
        num_splits = self.num_splits("row_statistics", chunk)
        parts = self.statistics(chunk, num_splits)
        operands = [self.operands.pre_query, self.operands.pre_key, self.operands.pre_base]
        self.run("row_statistics", chunk, [x, parts, *operands], num_splits)
        log_sum[chunk.rows, :, chunk.queries] = parts[0] if num_splits == 1 else _log_add(parts)

    def composed_weights(self, chunk: Chunk, x: Tensor, log_sum: Tensor) -> None:
        """Launch the kernel: scores to composed weights, in place."""
        num_splits = self.num_splits("composed_weights", chunk)
        self.run("composed_weights", chunk, [x, log_sum, *self.operands], num_splits)

    def post_gradients(
        self, chunk: Chunk, x: Tensor, da: Tensor, log_sum: Tensor, row_sum: Tensor, grads: Operands
    ) -> None:
        """Launch the kernel; put its chunk into `row_sum` and `grads.post_query`, add to `grads.post_base`."""
        num_splits = self.num_splits("post_gradients", chunk)
        parts = self.statistics(chunk, num_splits)
        before = [x, da, log_sum, parts, *self.operands]
        self._run_with_gradients("post_gradients", chunk, before, num_splits, grads.post_query, grads.post_base)
        row_sum[chunk.rows, :, chunk.queries] = parts.sum(0)

    def pre_gradients(
        self, chunk: Chunk, x: Tensor, da: Tensor, log_sum: Tensor, row_sum: Tensor, grads: Operands
    ) -> None:
        """Launch the kernel; put its chunk into `grads.pre_query`, add to `grads.pre_base`."""
        before = [x, da, log_sum, row_sum, *self.operands]
        num_splits = self.num_splits("pre_gradients", chunk)
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
        """Launch a kernel that stores gradients per split, and those of a base per program; add them up."""
        parts = sums = None
        if d_weights is not None:
            parts = d_weights.new_empty(num_splits, chunk.num_rows, chunk.num_queries, *d_weights.shape[2:])
        if d_base is not None:
            sums = d_base.new_empty(self.num_programs(name, chunk) * num_splits, 16, 16)
        self.run(name, chunk, [*tensors, parts, sums], num_splits)
        if d_weights is not None:
            d_weights[chunk.rows, chunk.queries] = parts.sum(0)
        if d_base is not None:
            self._add_base(chunk, sums, d_base)

    def _add_base(self, chunk: Chunk, sums: Tensor, d_base: Tensor) -> None:
        """Add the sums of all programs, block matrices of 16 slots, to the gradient of a base."""
        size, sets = self.slots_of_group, self.num_slot_sets(chunk)
        blocks = sums.view(sets, -1, 16 // size, size, 16 // size, size).sum(1).diagonal(dim1=1, dim2=3).movedim(-1, 1)
        real = blocks.flatten(0, 1)[: chunk.num_rows * self.options.num_groups, : self.heads, : self.heads]
        d_base += real.unflatten(0, (chunk.num_rows, -1)).sum(0)

    def key_gradients(
        self, chunk: Chunk, x: Tensor, da: Tensor, log_sum: Tensor, row_sum: Tensor, grads: Operands
    ) -> None:
        """Launch the kernel; add to `grads.pre_key` and `grads.post_key`."""
        totals = [grads.pre_key, grads.post_key]
        if totals == [None, None]:
            return
        num_splits = self.num_splits("key_gradients", chunk)
        size = (num_splits, chunk.num_rows, chunk.num_blocks, chunk.num_keys)
        parts = [None if total is None else total.new_empty(*size, *total.shape[2:]) for total in totals]
        self.run("key_gradients", chunk, [x, da, log_sum, row_sum, *self.operands, *parts], num_splits)
        for total, part in zip(totals, parts, strict=True):
            if total is not None:
                fold(total[chunk.rows].flatten(2), part.sum(0).flatten(3), chunk)


def _log_add(parts: Tensor) -> Tensor:
    """Add what base-2 logarithms [splits, ...] stand for; where all are -EMPTY, no key is visible: EMPTY."""
    top = parts.amax(0)
    return torch.where(top > -EMPTY / 2, top + (parts - top).exp2().sum(0).log2(), EMPTY)


def _dot_dtype(q: Tensor):
    """Operands of the products in the kernels; the interpreter cannot multiply bfloat16."""
    import triton.language as tl

    if q.dtype == torch.float32 or (q.dtype == torch.bfloat16 and not q.is_cuda):
        return tl.float32
    return tl.bfloat16 if q.dtype == torch.bfloat16 else tl.float16


def _fused_multiply_add(q: Tensor) -> dict[str, bool]:
    """Ask for fused multiply-add, which Triton will not choose by itself for ever; the interpreter has no options."""
    return {"enable_fp_fusion": True} if q.is_cuda else {}


def _multiply(a: Tensor, b: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
    """Multiply batches of matrices: scale a b."""
    ignored = a.new_empty(1, 1, 1) if out is None else out
    return torch.baddbmm(ignored, a, b, beta=0.0, alpha=scale, out=out)


def _aligned(x: Tensor) -> Tensor:
    """Pad keys or values with zeros to whole aligned rows of a workspace."""
    return F.pad(x, (0, 0, 0, round_up(x.shape[2], ALIGNMENT) - x.shape[2])).contiguous()


def _workspace(q: Tensor, plan: list[Chunk]) -> Tensor:
    """Make room for the largest chunk."""
    return q.new_empty(max((chunk.workspace_size(q.shape[1]) for chunk in plan), default=0))


def _result(q: Tensor, plan: list[Chunk]) -> Tensor:
    """Make room for what the chunks fill; zeros where there are none."""
    return torch.empty_like(q) if plan else torch.zeros_like(q)


def forward(
    q: Tensor, k: Tensor, v: Tensor, operands: Operands, key_mask: Tensor | None, options: Options
) -> tuple[Tensor, Tensor]:
    """Compute the output [B, H, T, D] and the base-2 log-sums [B, H, T] of contiguous operands."""
    B, H, T, _ = q.shape
    S = k.shape[2]
    mixer = Mixer(q, S, operands.to_columns(options.num_groups), key_mask, options)
    plan = chunks(B, H, T, S, q.element_size(), options.is_causal, options.window)
    workspace = _workspace(q, plan)
    k, v = _aligned(k), _aligned(v)
    out, log_sum = _result(q, plan), q.new_empty(B, H, T, dtype=torch.float32)
    for chunk in plan:
        x = chunk.workspace(workspace, H)
        _multiply(query_planes(q, chunk), key_planes(k, chunk).mT, options.scale, out=x)
        mixer.row_statistics(chunk, x, log_sum)
        mixer.composed_weights(chunk, x, log_sum)
        out[chunk.rows, :, chunk.queries] = chunk.of_queries(x @ key_planes(v, chunk), H)
    return out, log_sum


def backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    operands: Operands,
    key_mask: Tensor | None,
    log_sum: Tensor,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Operands]:
    """Compute the gradients of q, k, v and of the operands."""
    B, H, T, _ = q.shape
    S = k.shape[2]
    mixer = Mixer(q, S, operands.to_columns(options.num_groups), key_mask, options)
    plan = chunks(B, H, T, S, q.element_size(), options.is_causal, options.window)
    x_space, da_space = _workspace(q, plan), _workspace(q, plan)
    dk, dv = (torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (k, v))
    k, v = _aligned(k), _aligned(v)
    dq, row_sum = _result(q, plan), torch.empty_like(log_sum)
    grads = Operands(*(None if w is None else torch.zeros_like(w, dtype=torch.float32) for w in mixer.operands))
    for chunk in plan:
        x, da = chunk.workspace(x_space, H), chunk.workspace(da_space, H)
        queries, d_queries, keys = query_planes(q, chunk), query_planes(d_out, chunk), key_planes(k, chunk)
        _multiply(queries, keys.mT, options.scale, out=x)
        _multiply(d_queries, key_planes(v, chunk).mT, 1.0, out=da)
        mixer.post_gradients(chunk, x, da, log_sum, row_sum, grads)
        mixer.key_gradients(chunk, x, da, log_sum, row_sum, grads)
        mixer.pre_gradients(chunk, x, da, log_sum, row_sum, grads)
        dq[chunk.rows, :, chunk.queries] = chunk.of_queries(_multiply(da, keys, options.scale), H)
        for total, product in ((dk, _multiply(da.mT, queries, options.scale)), (dv, x.mT @ d_queries)):
            fold(total[chunk.rows].flatten(0, 1), chunk.of_keys(product, H), chunk)
    return dq, dk.to(q.dtype), dv.to(q.dtype), grads.from_columns(options.num_groups, mixer.heads)
