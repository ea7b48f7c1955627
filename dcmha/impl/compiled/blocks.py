"""One block of queries with its visible keys, and its compilation.

Compiled kernels are fastest with constant sizes, so only the number of keys, which differs between blocks, is dynamic.
Each shape of a call is compiled separately, up to `STATIC_SHAPES`; later shapes share a graph with dynamic sizes. There
is no silent fallback to uncompiled code.
"""

# B batch, T query tokens, S key tokens, H heads, D head dim, R compose rank, G head groups

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...weights import ComposeWeights
from ..call import compute_dtype
from ..dropout import drop
from ..flatten import tensors_of, with_tensors
from ..masking import masked_softmax

BACKEND = "inductor"
STATIC_SHAPES = 16
GRAPHS = 1024  # maximum graphs per function in torch: more than there are shapes and kinds of calls
WIDE_GROUP = 16  # heads per group from which sums deserve more registers
WIDE_OPTIONS = {"realize_reads_threshold": 64, "realize_opcount_threshold": 2000, "realize_acc_reads_threshold": 64}


class QueryBlock(NamedTuple):
    """A block of queries of an `AttentionCall` and their visible keys.

    Attributes:
        q: Queries [B, H, T, D].
        k: Keys [B, H / g, S, D].
        v: Values, same shape.
        pre: Composition of the scores, or None.
        post: Composition of the weights, or None.
        visible: Boolean, broadcastable to [B, H, T, S]: False hides a key; or None.
        bias: Added to the composed scores, broadcastable likewise; or None.
        scale: Factor on q k^T.
        num_groups: Head groups.
        has_open_keys: Whether the number of keys varies between such blocks: one of several blocks, or keys of a cache.
        may_be_empty: Whether a query may have no visible key.
        dropout_p: Probability of dropping a composed weight.
        seed: Dropout seed with the first query and key [4], int64; or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    pre: ComposeWeights | None
    post: ComposeWeights | None
    visible: Tensor | None
    bias: Tensor | None
    scale: float
    num_groups: int
    has_open_keys: bool
    may_be_empty: bool
    dropout_p: float
    seed: Tensor | None


def attend(block: QueryBlock) -> Tensor:
    """Compute the attention output of a block: [B, H, T, D]."""
    dtype = compute_dtype(block.q.dtype)
    (B, H, T, D), (_, key_heads, S, _) = block.q.shape, block.k.shape
    queries = block.q.reshape(B, key_heads, H // key_heads * T, D)  # heads that share keys are rows of one product
    scores = (queries.to(dtype) @ block.k.to(dtype).mT).view(B, H, T, S) * block.scale
    if block.pre is not None:
        scores = _compose(scores, block.pre, block.num_groups)
    if block.bias is not None:
        scores = scores + block.bias
    weights = masked_softmax(scores, block.visible, may_be_empty=block.may_be_empty)
    if block.post is not None:
        weights = _compose(weights, block.post, block.num_groups)
    if block.seed is not None:
        seed, first_query, first_key = block.seed[:2], block.seed[2], block.seed[3]
        weights = drop(weights, seed, block.dropout_p, first_query, first_key)
    out = weights.view(B, key_heads, H // key_heads * T, S) @ block.v.to(dtype)
    return out.view(B, H, T, D).to(block.q.dtype)


def gradients(block: QueryBlock, d_out: Tensor) -> list[Tensor]:
    """Compute the gradients of a block's tensors, in the order of `tensors_of` without those that are None."""
    given = [x for x in tensors_of(block) if x is not None]

    def of_given(*tensors: Tensor) -> Tensor:
        rest = iter(tensors)
        return attend(with_tensors(block, [None if x is None else next(rest) for x in tensors_of(block)]))

    _, back = torch.func.vjp(of_given, *given)
    return list(back(d_out))


def attend_compiled(block: QueryBlock) -> Tensor:
    """Compiled `attend`."""
    return _run_compiled("attend", block)


def gradients_compiled(block: QueryBlock, d_out: Tensor) -> list[Tensor]:
    """Compiled `gradients`."""
    return _run_compiled("gradients", block, d_out)


def _run_compiled(name: str, block: QueryBlock, *rest: Tensor):
    shape = (*block.q.shape, block.k.shape[1], None if block.has_open_keys else block.k.shape[2])
    is_known = shape in _static_shapes or len(_static_shapes) < STATIC_SHAPES
    if is_known:
        _static_shapes.add(shape)
        if block.has_open_keys:
            _open_keys(block)
    is_wide = block.q.shape[1] // block.num_groups >= WIDE_GROUP
    with torch._dynamo.config.patch(
        automatic_dynamic_shapes=False, recompile_limit=GRAPHS, accumulated_recompile_limit=GRAPHS
    ):
        return _compiled(name, not is_known, is_wide)(block, *rest)


_static_shapes: set[tuple] = set()


def _open_keys(block: QueryBlock) -> None:
    """Mark the number of keys as dynamic."""
    S = block.k.shape[2]
    weights = [w for composition in (block.pre, block.post) if composition is not None for w in composition.key]
    places = [(block.k, 2), (block.v, 2), *((w, 1) for w in weights if w is not None)]
    places += [(mask, mask.dim() - 1) for mask in (block.visible, block.bias) if mask is not None]
    for x, axis in places:
        if x.shape[axis] == S:
            torch._dynamo.maybe_mark_dynamic(x, axis)


@cache
def _compiled(name: str, is_open: bool, is_wide: bool) -> Callable:
    """Compile a function of this module once per process; torch limits the number of graphs per function."""
    return torch.compile(
        _FUNCTIONS[name, is_open],
        backend=BACKEND,
        dynamic=True if is_open else None,
        fullgraph=True,
        options=WIDE_OPTIONS if is_wide and BACKEND == "inductor" else None,
    )


_FUNCTIONS = {
    ("attend", False): lambda block: attend(block),
    ("attend", True): lambda block: attend(block),
    ("gradients", False): lambda block, d_out: gradients(block, d_out),
    ("gradients", True): lambda block, d_out: gradients(block, d_out),
}


def _compose(a: Tensor, weights: ComposeWeights, num_groups: int) -> Tensor:
    """Compose with explicit broadcasts and sums over the heads, a form the compiler fuses (an einsum would not be)."""
    a_BGHTS = a.unflatten(1, (num_groups, -1))
    out = a_BGHTS
    if weights.base is not None:
        base = weights.base.to(a.dtype)  # [G, from, to]
        out = out + (a_BGHTS.unsqueeze(3) * base[:, :, :, None, None]).sum(2)
    for (down, up, gate), token_axis in ((weights.query, -1), (weights.key, -2)):
        if down is not None:
            down, up = (_by_head(w, num_groups, a.dtype) for w in (down, up))  # [B, R, G, H/G, T or S]
            for r in range(down.shape[1]):
                hidden = (a_BGHTS * down[:, r].unsqueeze(token_axis)).sum(2, keepdim=True)
                out = out + hidden * up[:, r].unsqueeze(token_axis)
        if gate is not None:
            out = out + a_BGHTS * _by_head(gate, num_groups, a.dtype).unsqueeze(token_axis)
    return out.flatten(1, 2)


def _by_head(weight: Tensor, num_groups: int, dtype: torch.dtype) -> Tensor:
    """Move the tokens of [B, T, ..., H] last and split the heads: [B, ..., G, H/G, T]."""
    return weight.to(dtype).movedim(1, -1).unflatten(-2, (num_groups, -1))
