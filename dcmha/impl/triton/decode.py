"""Few queries over many keys, as in decoding: two kernels read the cache in place, without packing or copying.

Keys are split between programs to fill the GPU; their partial results are added in a fixed order.
"""

# B batch, T query tokens, S key tokens, H heads, D head dim

import torch
import triton
from torch import Tensor

from ...weights import ComposeWeights
from ..chunks import Chunk, chunks
from . import decode_kernels
from .head_mixing import KernelConfig
from .launch import FILL_PROGRAMS, KernelLauncher, launch_options
from .packing import WHOLE_BLOCKS, CallOptions, MaskOperands, Unpacked

MAX_QUERIES = 8  # maximum queries per call; for more, library products are faster
TILE_QUERIES = 2  # maximum queries per tile, if their full matrices are used and heads are at most TILE_BYTES
TILE_BYTES = 256  # maximum bytes per head for that
TILE_KEYS = 16
NUM_WARPS = 4
STEPS = {"decode_scores": 64, "decode_outputs": 32}  # maximum channels of keys or values per load
NUM_STAGES = 1  # pipeline stages: a step has enough loads in flight
MAX_SPLITS = 128  # each program of the second kernel reads the log-sum-exps of all splits


def decode_tile(name: str, num_queries: int, head_dim: int, itemsize: int, kind: KernelConfig) -> dict[str, int]:
    """Return the tile sizes of a kernel."""
    is_small = kind.BLOCKS <= WHOLE_BLOCKS and head_dim * itemsize <= TILE_BYTES
    return {
        "BLOCK_M": min(num_queries, TILE_QUERIES if is_small else 1),
        "BLOCK_N": TILE_KEYS,
        "D": head_dim,
        "STEP": min(STEPS[name], triton.next_power_of_2(head_dim)),
    }


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pre: ComposeWeights,
    post: ComposeWeights,
    mask_operands: MaskOperands,
    options: CallOptions,
) -> Tensor:
    """Compute the output [B, H, T, D]. Queries, weights, and the channels of keys and values must be contiguous."""
    mixer = KernelLauncher(q, k.shape[1:3], Unpacked(pre, post), mask_operands, options)
    B, H, T, D = q.shape
    out = torch.zeros_like(q) if k.shape[2] == 0 else torch.empty_like(q)
    for chunk in chunks(B, H, T, k.shape[2], 4, options.is_causal, options.window_size, has_bands=False):
        out[chunk.rows, :, chunk.queries] = _attend_chunk(q, k, v, mixer, chunk)
    return out


def _attend_chunk(q: Tensor, k: Tensor, v: Tensor, mixer: KernelLauncher, chunk: Chunk) -> Tensor:
    """Compute a chunk's output [rows, H, queries, D] in float32."""
    num_splits = _num_splits(mixer, chunk)
    x = q.new_empty(chunk.workspace_size(mixer.heads.count), dtype=torch.float32)
    lse = mixer.statistics(chunk, num_splits)
    outputs = q.new_empty(*lse.shape, q.shape[3], dtype=torch.float32)
    scale = mixer.options.scale
    _launch("decode_scores", mixer, chunk, num_splits, "pre", [q, k, x, lse, *k.stride()[:3], scale])
    _launch("decode_outputs", mixer, chunk, num_splits, "post", [x, lse, v, outputs, *v.stride()[:3]])
    return outputs[0] if num_splits == 1 else outputs.sum(0)


def _launch(name: str, mixer: KernelLauncher, chunk: Chunk, num_splits: int, composition: str, arguments: list) -> None:
    """Launch one kernel; `arguments` are those of its signature without compositions and masks."""
    getattr(decode_kernels, name)[(_num_programs(mixer, chunk) * num_splits,)](
        *arguments,
        mixer.operands.packed(composition),
        mixer.mask_operands.masks(),
        *mixer.sizes(chunk, num_splits),
        num_keys=chunk.num_keys,
        KIND=mixer.kind,
        **{composition.upper(): mixer.operands.form(composition, mixer.kind.BLOCKS)},
        **_tile(name, mixer, chunk),
        **launch_options(mixer.q.is_cuda, NUM_WARPS, NUM_STAGES),
    )


def _tile(name: str, mixer: KernelLauncher, chunk: Chunk) -> dict[str, int]:
    return decode_tile(name, chunk.block, mixer.q.shape[3], mixer.q.element_size(), mixer.kind)


def _num_programs(mixer: KernelLauncher, chunk: Chunk) -> int:
    """Number of programs of a kernel without splitting the keys."""
    return mixer.num_slot_sets(chunk) * triton.cdiv(chunk.block, _tile("decode_scores", mixer, chunk)["BLOCK_M"])


def _num_splits(mixer: KernelLauncher, chunk: Chunk) -> int:
    """Number of programs that share the keys, so that few rows also fill the GPU."""
    wanted = triton.cdiv(FILL_PROGRAMS, _num_programs(mixer, chunk))
    return min(wanted, MAX_SPLITS, triton.cdiv(chunk.num_keys, TILE_KEYS))
