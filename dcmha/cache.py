"""Decoding caches: keys, values and the key side of the compose weights, in ring buffers for windowed layers.

The key side is stored as low-rank factors and gates, 2(2R+1)H numbers per token and layer; full matrices would take
2 H^2. Buffers have a fixed size and the position is a tensor, so a decode step is compiled once.
"""

# B batch, T query tokens, S key tokens, H heads, D head dim, R compose rank

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .checks import check_integers
from .cross import ContextKV
from .weights import ComposeWeights, SideWeights

FEW_TOKENS = 8  # maximum new tokens per call that read the buffers in place, as the fused decoding kernels do


class CacheView(NamedTuple):
    """Keys and values that the queries of new tokens attend to.

    Attributes:
        k: Keys [B, num_kv_heads, S, D].
        v: Values, same shape.
        pre: Compose weights of the scores, with the key side of all S keys; or None.
        post: Compose weights of the attention weights, likewise.
        mask: Visible keys, broadcastable to [B, H, T, S]; or None.
        is_ordered: Whether keys are in token order up to the newest, so that `is_causal` and `window_size` of
            `composed_attention` apply in addition to the mask. Otherwise the mask includes causality.
        window_size: Window of the cache; must equal the layer's.
    """

    k: Tensor
    v: Tensor
    pre: ComposeWeights | None
    post: ComposeWeights | None
    mask: Tensor | None
    is_ordered: bool
    window_size: int | None


class CacheState:
    """Position of decoding, shared by the caches of all layers.

    Attributes:
        end: Number of tokens, padding included, up to the end of the current call: a scalar integer tensor; None before
            the first call.
        padding: Padding tokens before each row's prompt [B], or None for none.
    """

    def __init__(self, padding: Tensor | None) -> None:
        self.end: Tensor | None = None
        self.padding = padding
        self._rings: list[tuple[int, int | None]] = []
        self._masks: dict[tuple[int, int], Tensor] = {}

    def add_ring(self, size: int, window_size: int | None) -> int:
        """Register a layer's buffers by their size and window. Returns the index of this kind of buffer.

        Masks are stored by index rather than by size, because a compiler would recompile for each new size.
        """
        if (size, window_size) not in self._rings:
            self._rings.append((size, window_size))
        return self._rings.index((size, window_size))

    def advance(self, end: int, num_tokens: int, device: torch.device) -> None:
        """Advance to `end` tokens, of which the last `num_tokens` are those of the next call.

        Tensors are updated in place, so that a CUDA graph of a decode step reads their new values.
        """
        if self.end is not None and self.end.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError("the cache was created within torch.inference_mode(); continue within it.")
        is_first = self.end is None
        if is_first:
            self.end = torch.zeros((), dtype=torch.long, device=device)
            self.padding = None if self.padding is None else self.padding.to(device)
        self.end.fill_(end)
        if is_first or num_tokens > FEW_TOKENS:
            return
        for ring, (size, window_size) in enumerate(self._rings):
            mask = self._view(num_tokens, size, window_size)
            self._masks.setdefault((ring, num_tokens), mask).copy_(mask)

    def take(self, rows: Tensor) -> None:
        """Replace all rows by the given rows; their number may differ."""
        self.padding = None if self.padding is None else self.padding.index_select(0, rows)
        self._masks.clear()

    def mask(self, num_tokens: int, ring: int) -> Tensor:
        """Mask of the ring-buffer slots visible to the new tokens [B or 1, 1, T, size]; shared by equal layers."""
        return self._masks[ring, num_tokens]

    def _view(self, num_tokens: int, size: int, window_size: int | None) -> Tensor:
        newest, device = self.end - 1, self.end.device
        positions = newest - (newest - torch.arange(size, device=device)) % size  # negative for empty slots
        distance = (newest + 1 - num_tokens + torch.arange(num_tokens, device=device))[:, None] - positions
        is_visible = distance >= 0 if window_size is None else (distance >= 0) & (distance < window_size)
        return self.real(positions) & is_visible

    def real(self, positions: Tensor) -> Tensor:
        """Mask of the positions [S] that hold a token, not padding: [B, 1, 1, S], or [1, 1, 1, S] without padding."""
        if self.padding is None:
            return (positions >= 0)[None, None, None]
        return (positions >= self.padding[:, None])[:, None, None]


class LayerCache:
    """Cache of one layer of causal attention; implements `AttentionCache`. For inference only: no gradients.

    Args:
        capacity: Maximum tokens per row.
        window_size: Keys visible to a query, including its own position; None for all. Older ones are overwritten.
        clock: Decoding position, shared with the other layers.
    """

    def __init__(self, capacity: int, window_size: int | None, clock: CacheState) -> None:
        self.size = capacity if window_size is None else min(window_size + FEW_TOKENS - 1, capacity)
        self.window_size, self.clock = window_size, clock
        self.kept: list[Tensor] | None = None
        self.ring = clock.add_ring(self.size, window_size)

    def update(self, k: Tensor, v: Tensor, pre: ComposeWeights | None, post: ComposeWeights | None) -> CacheView:
        """Add new tokens and return the keys and values visible to them, as in `AttentionCache`.

        Calls with few new tokens read the buffers in place, without a copy.

        Raises:
            ValueError: If the dtype changes, or an input requires a gradient.
            MemoryError: If the cache cannot be allocated.
        """
        new = [k.transpose(1, 2), v.transpose(1, 2), *_key_parts(pre), *_key_parts(post)]
        self._check(new)
        visible, mask, is_ordered = self._view(new)
        keys, values, *parts = visible
        rest = iter(parts)
        pre, post = (_with_key_parts(weights, rest) for weights in (pre, post))
        return CacheView(keys.transpose(1, 2), values.transpose(1, 2), pre, post, mask, is_ordered, self.window_size)

    def _check(self, new: list[Tensor]) -> None:
        if torch.is_grad_enabled() and any(x.requires_grad for x in new):
            raise ValueError(
                "keys or values require a gradient, which a cache does not support; decode within torch.no_grad()."
            )
        for old, x in zip(self.kept or new, new, strict=True):
            if old.dtype != x.dtype:
                raise ValueError(f"the cache holds {old.dtype}; got {x.dtype}.")

    def _view(self, new: list[Tensor]) -> tuple[list[Tensor], Tensor | None, bool]:
        """Store tensors of new tokens [B, T, ...]; return the visible ones [B, S, ...], a mask, and `is_ordered`."""
        T = new[0].shape[1]
        positions = self.clock.end - T + torch.arange(T, device=new[0].device)
        if self.kept is None:
            self.kept = self._make_room(new)
            self._write(new, positions)
            return new, None if self.clock.padding is None else self.clock.real(positions), True
        if T <= FEW_TOKENS:
            self._write(new, positions)
            return self.kept, self.clock.mask(T, self.ring), False
        visible, visible_positions = self._after_kept(new, positions)
        self._write(new, positions)
        return visible, self.clock.real(visible_positions), True

    def _make_room(self, new: list[Tensor]) -> list[Tensor]:
        try:
            return [x.new_zeros(x.shape[0], self.size, *x.shape[2:]) for x in new]
        except RuntimeError as error:  # how torch reports that memory does not suffice
            raise MemoryError(f"no memory for a cache of {self.size:,} tokens.") from error

    def _after_kept(self, new: list[Tensor], positions: Tensor) -> tuple[list[Tensor], Tensor]:
        """Append new tokens to the stored ones in order; return all with their positions, negative for empty slots."""
        before = positions[0] - self.size + torch.arange(self.size, device=positions.device)
        places = before % self.size
        visible = [torch.cat([old[:, places], x], 1) for old, x in zip(self.kept, new, strict=True)]
        return visible, torch.cat([before, positions])

    def _write(self, new: list[Tensor], positions: Tensor) -> None:
        """Write the newest tokens into their ring-buffer slots."""
        places = positions[-self.size :] % self.size
        for kept, x in zip(self.kept, new, strict=True):
            kept.index_copy_(1, places, x[:, -self.size :].detach())


def _check_padding(padding: Tensor, capacity: int) -> None:
    """Check the numbers of padding tokens [B], and their values if they are available.

    Raises:
        ValueError: If they are not integers [B], or leave no room.
    """
    if not isinstance(padding, Tensor) or padding.dim() != 1 or padding.dtype not in (torch.int64, torch.int32):
        got = f"{padding.dtype} {list(padding.shape)}" if isinstance(padding, Tensor) else type(padding).__name__
        raise ValueError(f"padding is {got}; expected integers [B].")
    if padding.is_meta or isinstance(padding, FakeTensor) or torch.compiler.is_compiling():
        return
    if padding.numel() and not 0 <= padding.min() <= padding.max() < capacity:
        raise ValueError(f"padding={padding.tolist()} must be in [0, capacity={capacity}).")


class DecodingCache:
    """Caches of all layers of a decoder.

    Args:
        windows: Window size of each layer; None for unlimited.
        capacity: Maximum tokens per row, including padding.
        padding: Padding tokens before each row's prompt [B], so that all prompts end together; None for none.
        contexts: Precomputed context of each layer with cross-attention, None for the others; None if there are none.

    Raises:
        ValueError: If `capacity` or a window is not a positive integer, or padding or contexts do not match.
    """

    def __init__(
        self,
        windows: Sequence[int | None],
        capacity: int,
        padding: Tensor | None = None,
        contexts: Sequence[ContextKV | None] | None = None,
    ) -> None:
        check_integers(capacity=capacity)
        for window_size in windows:
            check_integers(may_be_none=True, window_size=window_size)
        if padding is not None:
            _check_padding(padding, capacity)
        if contexts is not None and len(contexts) != len(windows):
            raise ValueError(f"contexts has {len(contexts)} entries; expected one for each of {len(windows)} layers.")
        self.windows, self.capacity = tuple(windows), capacity
        self.num_tokens = 0
        self.num_rows: int | None = None
        self.is_broken = False
        self.clock = CacheState(padding)
        self.layers = [LayerCache(capacity, window_size, self.clock) for window_size in windows]
        self.contexts = [None] * len(self.windows) if contexts is None else list(contexts)

    def advance(self, num_rows: int, num_tokens: int, device: torch.device) -> Tensor:
        """Advance the position for new tokens, before the layers process them; return their positions in the text.

        Args:
            num_rows: Rows B.
            num_tokens: New tokens T per row.
            device: Device of the decoder.

        Returns:
            Positions [T], or [B, T] if rows have padding; 0 for padding tokens.

        Raises:
            ValueError: If they exceed the capacity, the number of rows changed, an earlier call failed, or the cache
                was created in inference mode and this call is outside of it.
        """
        check_integers(num_rows=num_rows, num_tokens=num_tokens)
        if self.is_broken:
            raise ValueError("an earlier call failed and left the cache incomplete; create a new one.")
        known = [*([] if self.clock.padding is None else [self.clock.padding]), *(s.k for s in self.contexts if s)]
        expected = len(known[0]) if known else self.num_rows
        if expected not in (None, num_rows):
            raise ValueError(f"the cache has {expected} rows; got {num_rows}.")
        if self.num_tokens + num_tokens > self.capacity:
            raise ValueError(
                f"the cache holds {self.capacity} tokens; {self.num_tokens} are used and {num_tokens} more do not fit."
            )
        self.num_rows = num_rows
        self.num_tokens += num_tokens
        self.clock.advance(self.num_tokens, num_tokens, device)
        positions = self.clock.end - num_tokens + torch.arange(num_tokens, device=device)
        if self.clock.padding is None:
            return positions
        return (positions - self.clock.padding[:, None]).clamp(min=0)

    def repeat(self, count: int) -> None:
        """Repeat each row several times consecutively, as beam search does with the prompts.

        Args:
            count: Number of repetitions.

        Raises:
            ValueError: If the cache is empty.
        """
        check_integers(count=count)
        if self.num_rows is None:
            raise ValueError("the cache is empty; its rows can be repeated after the first call.")
        rows = torch.arange(self.num_rows, device=self.clock.end.device).repeat_interleave(count)
        for layer in self.layers:
            layer.kept = [buffer.index_select(0, rows) for buffer in layer.kept]
        self.clock.take(rows)
        self.contexts = [context if context is None else context.rows(rows) for context in self.contexts]
        self.num_rows *= count

    def reorder(self, rows: Tensor) -> None:
        """Reorder the rows in place, as beam search does.

        Args:
            rows: For each new row, the index of the old row it copies: int64 [B].

        Raises:
            ValueError: If the cache is empty, or the number of rows differs.
        """
        if not isinstance(rows, Tensor) or rows.dtype not in (torch.int64, torch.int32):
            raise ValueError("rows: expected a tensor of integers [B].")
        if self.num_rows is None or rows.shape != (self.num_rows,):
            raise ValueError(f"rows has shape {list(rows.shape)}; expected [{self.num_rows or 'rows of a call'}].")
        kept = [buffer for layer in self.layers for buffer in layer.kept or []]
        padding = [] if self.clock.padding is None else [self.clock.padding]
        for buffer in (*kept, *padding):
            buffer.copy_(buffer.index_select(0, rows.to(buffer.device)))
        self.contexts = [
            context if context is None else context.rows(rows.to(context.k.device)) for context in self.contexts
        ]


def _key_parts(weights: ComposeWeights | None) -> list[Tensor]:
    """Tensors of the key side of a composition."""
    return [] if weights is None else [part for part in weights.key if part is not None]


def _with_key_parts(weights: ComposeWeights | None, parts: Iterator[Tensor]) -> ComposeWeights | None:
    """Replace the tensors that `_key_parts` returns."""
    if weights is None:
        return None
    return weights._replace(key=SideWeights(*(part if part is None else next(parts) for part in weights.key)))
