"""Forward and backward over chunks: library products on a reused workspace, and the kernels that mix heads on it.

For each chunk of images and queries, and the keys they may see:

    forward     x = scale q k^T;  row_statistics;  composed_weights;  o = x v
    backward    x = scale q k^T;  da = do v^T;  post_gradients;  key_gradients;  pre_gradients;
                dq = scale da k;  dk += scale da^T q;  dv += x^T do
"""

# B batch, T query tokens, S key tokens, H heads, D head dim, R compose rank, G head groups

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..masking import key_range
from . import kernels

WORKSPACE_MIB = 256  # of one workspace; the backward pass has two
ALIGNMENT = 16  # of a workspace's rows and a chunk's first key, in elements: aligned loads and products
CHUNK_QUERIES = 512  # of a chunk of causal or windowed attention
# Queries and keys of a tile, warps: what compiles without spills (tests/dcmha/triton/test_resources.py).
TILES = {
    "row_statistics": (8, 16, 4),
    "composed_weights": (8, 16, 4),
    "post_gradients": (8, 16, 4),
    "pre_gradients": (8, 16, 4),
    "key_gradients": (16, 8, 8),
}
FLOAT32_TILES = {  # products in float32 take more registers
    "row_statistics": (4, 16, 4),
    "composed_weights": (4, 16, 8),
    "post_gradients": (4, 16, 4),
    "pre_gradients": (2, 16, 8),
    "key_gradients": (16, 4, 8),
}


def tile_of(name: str, itemsize: int) -> tuple[int, int, int]:
    """Return the queries and keys of a kernel's tile, and its warps, for workspaces of 2 or 4 bytes an element."""
    return (FLOAT32_TILES if itemsize == 4 else TILES)[name]


class Operands(NamedTuple):
    """The packed weights [B, N, 2R + gate, H] of both compositions and sides, and their bases [G, H/G, H/G]."""

    pre_q: Tensor | None
    pre_k: Tensor | None
    pre_base: Tensor | None
    post_q: Tensor | None
    post_k: Tensor | None
    post_base: Tensor | None


@dataclass(frozen=True)
class Call:
    """What a call is, apart from its tensors."""

    is_causal: bool
    window: int
    scale: float
    num_groups: int


class Chunk(NamedTuple):
    """A range of images, of queries, and of the keys that those may see."""

    images: slice
    queries: slice
    keys: slice


def chunks(B: int, H: int, T: int, S: int, itemsize: int, call: Call) -> Iterator[Chunk]:
    """Cut a call so that a workspace stays within its budget: by queries, then by images.

    Where queries see different keys, chunks are short, so that products leave out most of what is hidden.
    """
    budget = WORKSPACE_MIB * 2**20 // itemsize
    window = call.window or None
    queries = min(T, CHUNK_QUERIES) if call.is_causal or window else T
    widest = S if window is None else min(S, queries + (1 if call.is_causal else 2) * window)
    row = H * (widest + ALIGNMENT)
    queries = max(1, min(queries, int(budget // row)))
    images = max(1, int(budget // (row * queries)))
    for b in range(0, B, images):
        for i in range(0, T, queries):
            stop = min(T, i + queries)
            first, last = key_range(i, stop, T, S, call.is_causal, window)
            yield Chunk(slice(b, min(B, b + images)), slice(i, stop), slice(first // ALIGNMENT * ALIGNMENT, last))


class Workspace:
    """One buffer, seen as [images * H, queries, keys] by each chunk in turn."""

    def __init__(self, like: Tensor) -> None:
        self.like, self.buffer = like, like.new_empty(0)

    def view(self, planes: int, queries: int, keys: int) -> tuple[Tensor, int]:
        """Return the chunk's view [planes, queries, keys] and the stride of its rows."""
        stride = -(-keys // ALIGNMENT) * ALIGNMENT
        size = planes * queries * stride
        if self.buffer.numel() < size:
            self.buffer = self.like.new_empty(size)
        return self.buffer[:size].view(planes, queries, stride)[:, :, :keys], stride


class Mixer:
    """Launches the kernels of a call on its chunks."""

    def __init__(self, q: Tensor, S: int, operands: Operands, key_mask: Tensor | None, call: Call) -> None:
        self.B, self.H, self.T, _ = q.shape
        self.S, self.call, self.operands = S, call, operands
        self.group_heads = self.H // call.num_groups
        self.slots_of_group = max(4, triton.next_power_of_2(self.group_heads))
        self.dummy = q.new_empty(1, dtype=torch.float32)
        self.key_mask = key_mask
        self.dot = _dot_dtype(q)
        self.log_sum = q.new_empty(self.B, self.H, self.T, dtype=torch.float32)

    def run(self, name: str, chunk: Chunk, stride: int, tensors: list[Tensor | None]) -> None:
        """Launch one kernel; `tensors` are what comes before and after the operands in its signature."""
        kernel = getattr(kernels, name)
        given = [self.dummy if t is None else t for t in tensors]
        by_keys = name == "key_gradients"
        num_queries, num_keys = (s.stop - s.start for s in (chunk.queries, chunk.keys))
        num_images = chunk.images.stop - chunk.images.start
        query_tile, key_tile, num_warps = tile_of(name, given[0].element_size())
        num_instances = num_images * self.call.num_groups
        programs = triton.cdiv(num_keys, key_tile) if by_keys else triton.cdiv(num_queries, query_tile)
        grid = (programs, self.grid_instances(num_instances))
        kernel[grid](
            *given,
            self.dummy if self.key_mask is None else self.key_mask,
            *(num_instances, self.call.num_groups, self.group_heads, self.H, chunk.images.start, self.T, self.S),
            *(chunk.queries.start, num_queries, chunk.keys.start, num_keys, stride, self.call.window),
            P=self.slots_of_group,
            **self._forms(name),
            IS_CAUSAL=self.call.is_causal,
            HAS_MASK=self.key_mask is not None,
            DOT=self.dot,
            BQ=query_tile,
            BK=key_tile,
            num_warps=num_warps,
            num_stages=1,
            **_fused_multiply_add(given[0]),
        )

    def run_with_base(
        self, name: str, chunk: Chunk, stride: int, tensors: list[Tensor | None], d_base: Tensor | None
    ) -> None:
        """Launch a kernel that also sums the gradient of a base, per program; add the sums to `d_base`."""
        if d_base is None:
            return self.run(name, chunk, stride, [*tensors, None])
        num_images = chunk.images.stop - chunk.images.start
        num_instances, P = num_images * self.call.num_groups, self.slots_of_group
        programs = triton.cdiv(chunk.queries.stop - chunk.queries.start, tile_of(name, tensors[0].element_size())[0])
        sums = d_base.new_empty(self.grid_instances(num_instances), programs, 16, 16)
        self.run(name, chunk, stride, [*tensors, sums])
        blocks = sums.sum(1).view(-1, 16 // P, P, 16 // P, P).diagonal(dim1=1, dim2=3).movedim(-1, 1)
        real = blocks.flatten(0, 1)[:num_instances, : self.group_heads, : self.group_heads]
        d_base += real.unflatten(0, (num_images, -1)).sum(0)

    def grid_instances(self, num_instances: int) -> int:
        """Count the programs that hold so many instances."""
        return triton.cdiv(num_instances, 16 // self.slots_of_group)

    def _forms(self, name: str) -> dict[str, int]:
        """Describe the operands to a kernel: ranks, gates and bases."""
        forms = {}
        for composition in ("pre",) if name == "row_statistics" else ("pre", "post"):
            for side in ("q", "k"):
                packed = getattr(self.operands, f"{composition}_{side}")
                rows = 0 if packed is None else packed.shape[2]
                forms[f"{composition.upper()}_{side.upper()}R"] = rows // 2
                forms[f"{composition.upper()}_{side.upper()}G"] = rows % 2
            forms[f"{composition.upper()}_B"] = int(getattr(self.operands, f"{composition}_base") is not None)
        return forms


def _dot_dtype(q: Tensor):
    """Operands of the products in the kernels; the interpreter cannot multiply bfloat16."""
    import triton.language as tl

    if q.dtype == torch.float32 or (q.dtype == torch.bfloat16 and not q.is_cuda):
        return tl.float32
    return tl.bfloat16 if q.dtype == torch.bfloat16 else tl.float16


def _fused_multiply_add(tensor: Tensor) -> dict[str, bool]:
    """Ask the compiler for fused multiply-add, which newer versions no longer take for granted."""
    return {"enable_fp_fusion": True} if tensor.is_cuda else {}


def _planes(x: Tensor, chunk: Chunk, tokens: slice) -> Tensor:
    """See a chunk of [B, H, N, D] as [images * H, tokens, D]."""
    return x[chunk.images, :, tokens].flatten(0, 1)


def _product(out: Tensor, a: Tensor, b: Tensor, scale: float = 1.0) -> None:
    """out = scale a b, for batches of matrices."""
    torch.baddbmm(out, a, b, beta=0.0, alpha=scale, out=out)


def _add_product(total: Tensor, a: Tensor, b: Tensor, scale: float = 1.0) -> None:
    """Total += scale a b in the total's dtype, float32."""
    if a.is_cuda and a.dtype != total.dtype:
        torch.baddbmm(total, a, b, alpha=scale, out_dtype=total.dtype, out=total)
    else:
        total.baddbmm_(a.to(total.dtype), b.to(total.dtype), alpha=scale)


def forward(
    q: Tensor, k: Tensor, v: Tensor, operands: Operands, key_mask: Tensor | None, call: Call
) -> tuple[Tensor, Tensor]:
    """Compute the output [B, H, T, D] and the base-2 log-sums [B, H, T] of contiguous operands."""
    B, H, T, D = q.shape
    S = k.shape[2]
    mixer, workspace = Mixer(q, S, operands, key_mask, call), Workspace(q)
    out = torch.empty_like(q)
    for chunk in chunks(B, H, T, S, q.element_size(), call):
        keys, values = _planes(k, chunk, chunk.keys), _planes(v, chunk, chunk.keys)
        queries = _planes(q, chunk, chunk.queries)
        x, stride = workspace.view(*queries.shape[:2], keys.shape[1])
        _product(x, queries, keys.mT, call.scale)
        pre = [operands.pre_q, operands.pre_k, operands.pre_base]
        mixer.run("row_statistics", chunk, stride, [x, mixer.log_sum, *pre])
        mixer.run("composed_weights", chunk, stride, [x, mixer.log_sum, *operands])
        out[chunk.images, :, chunk.queries] = (x @ values).unflatten(0, (-1, H))
    return out, mixer.log_sum


def backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    operands: Operands,
    key_mask: Tensor | None,
    log_sum: Tensor,
    call: Call,
) -> tuple[Tensor, Tensor, Tensor, Operands]:
    """Compute the gradients of q, k, v and of the operands."""
    B, H, T, D = q.shape
    S = k.shape[2]
    mixer = Mixer(q, S, operands, key_mask, call)
    mixer.log_sum = log_sum
    row_sum = torch.empty_like(log_sum)
    x_space, da_space = Workspace(q), Workspace(q)
    dq = torch.empty_like(q)
    dk, dv = (torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (k, v))
    grads = Operands(*(None if w is None else torch.zeros_like(w, dtype=torch.float32) for w in operands))
    for chunk in chunks(B, H, T, S, q.element_size(), call):
        keys, values = _planes(k, chunk, chunk.keys), _planes(v, chunk, chunk.keys)
        queries, d_queries = _planes(q, chunk, chunk.queries), _planes(d_out, chunk, chunk.queries)
        x, stride = x_space.view(*queries.shape[:2], keys.shape[1])
        da, _ = da_space.view(*queries.shape[:2], keys.shape[1])
        _product(x, queries, keys.mT, call.scale)
        _product(da, d_queries, values.mT)
        shared = [x, da, log_sum, row_sum, *operands]
        mixer.run_with_base("post_gradients", chunk, stride, [*shared, grads.post_q], grads.post_base)
        if grads.pre_k is not None or grads.post_k is not None:
            mixer.run("key_gradients", chunk, stride, [*shared, grads.pre_k, grads.post_k])
        mixer.run_with_base("pre_gradients", chunk, stride, [*shared, grads.pre_q], grads.pre_base)
        dq[chunk.images, :, chunk.queries] = (call.scale * (da @ keys)).unflatten(0, (-1, H))
        _add_product(_planes(dk, chunk, chunk.keys), da.mT, queries, call.scale)
        _add_product(_planes(dv, chunk, chunk.keys), x.mT, d_queries)
    return dq, dk.to(k.dtype), dv.to(v.dtype), grads
