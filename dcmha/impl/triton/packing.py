"""Operands of the kernels: packed compose weights, masks, options."""

# B batch, T query tokens, S key tokens, H heads, R compose rank, G head groups

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...weights import ComposeWeights, SideWeights
from ..chunks import round_up
from ..dropout import threshold_of
from ..packed_gradients import packed_rows
from .head_mixing import ComposeSpec, KernelConfig, Packed
from .masking import Masks

WHOLE_BLOCKS = 2  # maximum blocks of a tile whose full matrices fit into registers


def slots_of_group(heads: int) -> int:
    """Number of slots for the heads of a group: 4, 8, or 16 per block."""
    return next((slots for slots in (4, 8) if heads <= slots), round_up(heads, 16))


class ComposeOperands(NamedTuple):
    """Packed weights [B, T or S, 2R + gate, H] of both compositions and sides, and their bases [G, H/G, H/G].

    The kernels use GROUP_SLOTS columns per group, some of them empty; bases are not padded.
    """

    pre_query: Tensor | None
    pre_key: Tensor | None
    pre_base: Tensor | None
    post_query: Tensor | None
    post_key: Tensor | None
    post_base: Tensor | None

    def packed(self, composition: str) -> Packed:
        """Take those of "pre" or "post"."""
        return Packed(*(self[:3] if composition == "pre" else self[3:]))

    def form(self, composition: str, blocks: int) -> ComposeSpec:
        """Tell the kernels which branches "pre" or "post" has, and how a tile of so many blocks applies them."""
        query, key, base = self.packed(composition)
        return compose_spec(rank_and_gate(query), rank_and_gate(key), base is not None, blocks)

    def to_columns(self, num_groups: int) -> "ComposeOperands":
        """Pad columns to [B, T or S, 2R + gate, G GROUP_SLOTS], for aligned loads."""

        def pad(w: Tensor | None) -> Tensor | None:
            if w is None:
                return None
            if w.dim() == 3:
                return w.contiguous()
            groups = w.unflatten(3, (num_groups, -1))
            return F.pad(groups, (0, slots_of_group(groups.shape[4]) - groups.shape[4])).flatten(3).contiguous()

        return ComposeOperands(*map(pad, self))

    def from_columns(self, num_groups: int, heads: int) -> "ComposeOperands":
        """Remove the padding columns of gradients."""

        def cut(w: Tensor | None) -> Tensor | None:
            if w is None or w.dim() == 3:
                return w
            return w.unflatten(3, (num_groups, -1))[..., :heads].flatten(3).contiguous()

        return ComposeOperands(*map(cut, self))


class Unpacked(NamedTuple):
    """Both compositions as `SideWeights`, without packing."""

    pre: ComposeWeights
    post: ComposeWeights

    def packed(self, composition: str) -> Packed:
        """Take those of "pre" or "post"."""
        return Packed(*getattr(self, composition))

    def form(self, composition: str, blocks: int) -> ComposeSpec:
        """Tell the kernels which branches "pre" or "post" has, and how a tile of so many blocks applies them."""
        query, key, base = getattr(self, composition)
        return compose_spec(_rank_and_gate(query), _rank_and_gate(key), base is not None, blocks)


def _rank_and_gate(side: SideWeights) -> tuple[int, int]:
    return 0 if side.down is None else side.down.shape[2], int(side.gate is not None)


def compose_spec(query: tuple[int, int], key: tuple[int, int], has_base: bool, blocks: int) -> ComposeSpec:
    """`ComposeSpec` of a composition given the rank and gate (1 or 0) of each side and the blocks of a tile."""
    return ComposeSpec(*query, *key, int(has_base), int(blocks > WHOLE_BLOCKS and not has_base))


def pack_call(pre: ComposeWeights | None, post: ComposeWeights | None) -> ComposeOperands:
    """Pack the weights of both compositions."""
    operands = []
    for weights in (pre or ComposeWeights(), post or ComposeWeights()):
        operands += [_pack(weights.query), _pack(weights.key), weights.base]
    return ComposeOperands(*operands)


def _pack(side: SideWeights) -> Tensor | None:
    """Concatenate one side's weights to one tensor [B, T or S, 2R + gate, H]."""
    if packed_rows(side) == 0:
        return None
    gate = side.gate if side.gate is None else side.gate.unsqueeze(2)
    return torch.cat([part for part in (side.down, side.up, gate) if part is not None], 2)


def rank_and_gate(packed: Tensor | None) -> tuple[int, int]:
    """Rank of packed weights [B, T or S, 2R + gate, H], and whether they have a gate (1 or 0)."""
    rank, gate = divmod(0 if packed is None else packed.shape[2], 2)
    return rank, gate


class MaskOperands(NamedTuple):
    """Operands for masking and dropout.

    Attributes:
        mask: Boolean, or floating and added after the pre-composition; broadcastable to [B, H, T, S], with four axes;
            None for none.
        starts: First token of each token's document [B, S], int32; None without documents.
        stops: End of the document, exclusive, likewise.
        seed: Dropout seed [2], int64; None without dropout.
    """

    mask: Tensor | None
    starts: Tensor | None
    stops: Tensor | None
    seed: Tensor | None

    def masks(self) -> Masks:
        """Tensors for the kernels; booleans are viewed as bytes."""
        is_boolean = self.mask is not None and self.mask.dtype == torch.bool
        return Masks(self.mask.view(torch.uint8) if is_boolean else self.mask, self.starts, self.stops, self.seed)

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of the mask over [B, H, T, S], 0 along broadcast axes."""
        if self.mask is None:
            return (0,) * 4
        return tuple(0 if n == 1 else stride for n, stride in zip(self.mask.shape, self.mask.stride(), strict=True))


@dataclass(frozen=True)
class CallOptions:
    """Options of a call; a window of 0 means none."""

    is_causal: bool
    window_size: int
    scale: float
    dropout_p: float
    num_groups: int


def kernel_config(q: Tensor, mask_operands: MaskOperands, options: CallOptions, mask_gradient: bool) -> KernelConfig:
    """`KernelConfig` of a call."""
    heads, mask = q.shape[1] // options.num_groups, mask_operands.mask
    slots = slots_of_group(heads)
    return KernelConfig(
        GROUP_SLOTS=slots,
        HEADS=heads,
        BLOCKS=max(1, slots // 16),
        IS_CAUSAL=options.is_causal,
        HAS_WINDOW=options.window_size > 0,
        HAS_DOCUMENTS=mask_operands.starts is not None,
        MASK=0 if mask is None else 1 if mask.dtype == torch.bool else 2,
        MASK_HEADS=mask is not None and mask.shape[1] > 1,
        MASK_QUERIES=mask is not None and mask.shape[2] > 1,
        MASK_GRADIENT=mask_gradient,
        HAS_DROPOUT=mask_operands.seed is not None,
        DOT=_dot_dtype(q),
    )


def drop_sizes(dropout_p: float) -> dict[str, float]:
    """`threshold` and `keep_scale` of `Sizes`."""
    return {"threshold": threshold_of(dropout_p), "keep_scale": 1.0 / (1.0 - dropout_p)}


def _dot_dtype(q: Tensor):
    """Dtype of the operands of matrix products; the interpreter cannot multiply bfloat16."""
    import triton.language as tl

    if q.dtype == torch.float32 or (q.dtype == torch.bfloat16 and not q.is_cuda):
        return tl.float32
    return tl.bfloat16 if q.dtype == torch.bfloat16 else tl.float16
