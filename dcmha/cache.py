"""Decoding caches: keys, values and the key side of the compose weights, in ring buffers for windowed layers.

The key side is kept as low-rank factors and gates, 2(2R+1)H numbers a token and layer; merging it into matrices would
take 2 H^2. Buffers have a fixed size and the position is a tensor, so that a decode step compiles once.
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

FEW_TOKENS = 8  # of a call, at most, that see the buffers as they lie; the fused kernels of few queries take as many


class CacheView(NamedTuple):
    """What the queries of new tokens are given.

    Attributes:
        k: Keys [B, num_kv_heads, S, D].
        v: Values, likewise.
        pre: Composition of the scores, with the key side of all those; or None.
        post: Composition of the weights, likewise.
        mask: Which keys may be seen, broadcastable to [B, H, T, S]; or None.
        is_ordered: Whether keys come in the order of their tokens up to the newest, so that `is_causal` and `window` of
            `composed_attention` hold, besides the mask. Else the mask says all, for causal attention.
        window: Of the cache: a layer must have the same.
    """

    k: Tensor
    v: Tensor
    pre: ComposeWeights | None
    post: ComposeWeights | None
    mask: Tensor | None
    is_ordered: bool
    window: int | None


class CacheState:
    """How far decoding is: what the layers' caches share.

    Attributes:
        end: Tokens (padding included) up to and with the current call, an integer tensor of no axes; None before.
        padding: Padding tokens before each row's prompt [B], or None for none.
    """

    def __init__(self, padding: Tensor | None) -> None:
        self.end: Tensor | None = None
        self.padding = padding
        self._rings: list[tuple[int, int | None]] = []
        self._masks: dict[tuple[int, int], Tensor] = {}

    def add_ring(self, size: int, window: int | None) -> int:
        """Tell of a layer's buffers: places, and keys that a query sees. Return the number of buffers of this kind.

        Masks are stored under this number, not under sizes: a compiler would recompile for each new size.
        """
        if (size, window) not in self._rings:
            self._rings.append((size, window))
        return self._rings.index((size, window))

    def advance(self, end: int, num_tokens: int, device: torch.device) -> None:
        """Go on to a number of tokens, of which some are those of the next call.

        Tensors keep their memory, so that a recorded decode step (a CUDA graph) sees what they come to hold.
        """
        if self.end is not None and self.end.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError("the cache was begun within torch.inference_mode(); go on within it.")
        is_first = self.end is None
        if is_first:
            self.end = torch.zeros((), dtype=torch.long, device=device)
            self.padding = None if self.padding is None else self.padding.to(device)
        self.end.fill_(end)
        if is_first or num_tokens > FEW_TOKENS:
            return
        for ring, (size, window) in enumerate(self._rings):
            mask = self._view(num_tokens, size, window)
            self._masks.setdefault((ring, num_tokens), mask).copy_(mask)

    def take(self, rows: Tensor) -> None:
        """Put other rows in the place of all, any number of them."""
        self.padding = None if self.padding is None else self.padding.index_select(0, rows)
        self._masks.clear()

    def mask(self, num_tokens: int, ring: int) -> Tensor:
        """Tell which places of ring buffers the new tokens may see [B or 1, 1, T, size]; layers alike share it."""
        return self._masks[ring, num_tokens]

    def _view(self, num_tokens: int, size: int, window: int | None) -> Tensor:
        newest, device = self.end - 1, self.end.device
        held = newest - (newest - torch.arange(size, device=device)) % size  # negative for empty places
        distance = (newest + 1 - num_tokens + torch.arange(num_tokens, device=device))[:, None] - held
        seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        return self.real(held) & seen

    def real(self, positions: Tensor) -> Tensor:
        """Tell which positions [S] hold a token of each row: [B, 1, 1, S], or [1, 1, 1, S] without padding."""
        if self.padding is None:
            return (positions >= 0)[None, None, None]
        return (positions >= self.padding[:, None])[:, None, None]


class LayerCache:
    """The cache of one layer of causal attention; fulfils `AttentionCache`. For inference: it takes no gradients.

    Args:
        capacity: Most tokens of a row.
        window: Keys that a query sees, its own included; None for all. Older ones are overwritten.
        clock: Shared with the other layers.
    """

    def __init__(self, capacity: int, window: int | None, clock: CacheState) -> None:
        self.size = capacity if window is None else min(window + FEW_TOKENS - 1, capacity)
        self.window, self.clock = window, clock
        self.kept: list[Tensor] | None = None
        self.ring = clock.add_ring(self.size, window)

    def update(self, k: Tensor, v: Tensor, pre: ComposeWeights | None, post: ComposeWeights | None) -> CacheView:
        """Add new tokens and return all that they may see, as `AttentionCache` says.

        Few tokens after others are given the buffers themselves, in which nothing is moved.

        Raises:
            ValueError: If a dtype is another than before, or something carries a gradient.
            MemoryError: If there is no room for the cache.
        """
        new = [k.transpose(1, 2), v.transpose(1, 2), *_key_parts(pre), *_key_parts(post)]
        self._check(new)
        seen, mask, is_ordered = self._view(new)
        keys, values, *parts = seen
        rest = iter(parts)
        pre, post = (_with_key_parts(weights, rest) for weights in (pre, post))
        return CacheView(keys.transpose(1, 2), values.transpose(1, 2), pre, post, mask, is_ordered, self.window)

    def _check(self, new: list[Tensor]) -> None:
        if torch.is_grad_enabled() and any(x.requires_grad for x in new):
            raise ValueError(
                "a cache takes no gradients, and new keys or values have one; decode within torch.no_grad()."
            )
        for old, x in zip(self.kept or new, new, strict=True):
            if old.dtype != x.dtype:
                raise ValueError(f"the cache holds {old.dtype}; got {x.dtype}.")

    def _view(self, new: list[Tensor]) -> tuple[list[Tensor], Tensor | None, bool]:
        """Keep what new tokens bring, [B, T, ...] each; return what they see [B, S, ...], a mask, if it is ordered."""
        T = new[0].shape[1]
        positions = self.clock.end - T + torch.arange(T, device=new[0].device)
        if self.kept is None:
            self.kept = self._make_room(new)
            self._write(new, positions)
            return new, None if self.clock.padding is None else self.clock.real(positions), True
        if T <= FEW_TOKENS:
            self._write(new, positions)
            return self.kept, self.clock.mask(T, self.ring), False
        seen, seen_positions = self._after_kept(new, positions)
        self._write(new, positions)
        return seen, self.clock.real(seen_positions), True

    def _make_room(self, new: list[Tensor]) -> list[Tensor]:
        try:
            return [x.new_zeros(x.shape[0], self.size, *x.shape[2:]) for x in new]
        except RuntimeError as error:  # torch's way to say that memory does not suffice, in several lines
            raise MemoryError(f"no memory for a cache of {self.size:,} tokens.") from error

    def _after_kept(self, new: list[Tensor], positions: Tensor) -> tuple[list[Tensor], Tensor]:
        """Put new tokens after the kept ones, in order; return all with their positions, negative for empty places."""
        before = positions[0] - self.size + torch.arange(self.size, device=positions.device)
        places = before % self.size
        seen = [torch.cat([old[:, places], x], 1) for old, x in zip(self.kept, new, strict=True)]
        return seen, torch.cat([before, positions])

    def _write(self, new: list[Tensor], positions: Tensor) -> None:
        """Put the newest tokens into their places."""
        places = positions[-self.size :] % self.size
        for kept, x in zip(self.kept, new, strict=True):
            kept.index_copy_(1, places, x[:, -self.size :].detach())


def _check_padding(padding: Tensor, capacity: int) -> None:
    """Check numbers of padding tokens [B]; their values where they have some.

    Raises:
        ValueError: If they are none, or leave no room.
    """
    if not isinstance(padding, Tensor) or padding.dim() != 1 or padding.dtype not in (torch.int64, torch.int32):
        got = f"{padding.dtype} {list(padding.shape)}" if isinstance(padding, Tensor) else type(padding).__name__
        raise ValueError(f"padding is {got}; expected integers [B].")
    if padding.is_meta or isinstance(padding, FakeTensor) or torch.compiler.is_compiling():
        return
    if padding.numel() and not 0 <= padding.min() <= padding.max() < capacity:
        raise ValueError(f"padding={padding.tolist()} must be in [0, capacity={capacity}).")


class DecodingCache:
    """The caches of all layers of a decoder.

    Args:
        windows: Window of each layer, or None where it sees all.
        capacity: Most tokens of a row, padding included.
        padding: Padding tokens before each row's prompt [B], so that all prompts end together; None for none.
        contexts: Of each layer, what it made of another sequence that it looks at, or None; None for none at all.

    Raises:
        ValueError: If `capacity` or a window is no integer of at least 1, or padding or contexts do not fit.
    """

    def __init__(
        self,
        windows: Sequence[int | None],
        capacity: int,
        padding: Tensor | None = None,
        contexts: Sequence[ContextKV | None] | None = None,
    ) -> None:
        check_integers(capacity=capacity)
        for window in windows:
            check_integers(may_be_none=True, window=window)
        if padding is not None:
            _check_padding(padding, capacity)
        if contexts is not None and len(contexts) != len(windows):
            raise ValueError(f"contexts has {len(contexts)} entries; expected one for each of {len(windows)} layers.")
        self.windows, self.capacity = tuple(windows), capacity
        self.num_tokens = 0
        self.num_rows: int | None = None
        self.is_broken = False
        self.clock = CacheState(padding)
        self.layers = [LayerCache(capacity, window, self.clock) for window in windows]
        self.contexts = [None] * len(self.windows) if contexts is None else list(contexts)

    def advance(self, num_rows: int, num_tokens: int, device: torch.device) -> Tensor:
        """Make room for new tokens, before the layers see them; return their positions in the text.

        Args:
            num_rows: Rows B.
            num_tokens: New tokens T of every row.
            device: Where the decoder runs.

        Returns:
            [T], or [B, T] if rows have padding; 0 for padding itself.

        Raises:
            ValueError: If they exceed the capacity, the rows are others than before, the cache is broken, or was begun
                in inference mode and this is not.
        """
        check_integers(num_rows=num_rows, num_tokens=num_tokens)
        if self.is_broken:
            raise ValueError("a call that failed left the cache half written; make a new one.")
        known = [*([] if self.clock.padding is None else [self.clock.padding]), *(s.k for s in self.contexts if s)]
        expected = len(known[0]) if known else self.num_rows
        if expected not in (None, num_rows):
            raise ValueError(f"the cache is of {expected} rows; got {num_rows}.")
        if self.num_tokens + num_tokens > self.capacity:
            raise ValueError(
                f"the cache holds {self.capacity} tokens; {self.num_tokens} are in it and {num_tokens} more do not fit."
            )
        self.num_rows = num_rows
        self.num_tokens += num_tokens
        self.clock.advance(self.num_tokens, num_tokens, device)
        positions = self.clock.end - num_tokens + torch.arange(num_tokens, device=device)
        if self.clock.padding is None:
            return positions
        return (positions - self.clock.padding[:, None]).clamp(min=0)

    def repeat(self, count: int) -> None:
        """Put each row several times, one after the other, as beam search does with the prompts.

        Args:
            count: How many times.

        Raises:
            ValueError: If there is nothing in the cache.
        """
        check_integers(count=count)
        if self.num_rows is None:
            raise ValueError("nothing is in the cache; its rows can be repeated after the first call.")
        rows = torch.arange(self.num_rows, device=self.clock.end.device).repeat_interleave(count)
        for layer in self.layers:
            layer.kept = [buffer.index_select(0, rows) for buffer in layer.kept]
        self.clock.take(rows)
        self.contexts = [seen if seen is None else seen.rows(rows) for seen in self.contexts]
        self.num_rows *= count

    def reorder(self, rows: Tensor) -> None:
        """Put other rows in the place of each, as beam search does; buffers keep their memory.

        Args:
            rows: Row [B] that each becomes, int64.

        Raises:
            ValueError: If there is nothing in the cache, or the rows are not as many as before.
        """
        if not isinstance(rows, Tensor) or rows.dtype not in (torch.int64, torch.int32):
            raise ValueError("rows: expected a tensor of integers [B].")
        if self.num_rows is None or rows.shape != (self.num_rows,):
            raise ValueError(f"rows has shape {list(rows.shape)}; expected [{self.num_rows or 'rows of a call'}].")
        kept = [buffer for layer in self.layers for buffer in layer.kept or []]
        padding = [] if self.clock.padding is None else [self.clock.padding]
        for buffer in (*kept, *padding):
            buffer.copy_(buffer.index_select(0, rows.to(buffer.device)))
        self.contexts = [seen if seen is None else seen.rows(rows.to(seen.k.device)) for seen in self.contexts]


def _key_parts(weights: ComposeWeights | None) -> list[Tensor]:
    """List the tensors of a composition's key side."""
    return [] if weights is None else [part for part in weights.key if part is not None]


def _with_key_parts(weights: ComposeWeights | None, parts: Iterator[Tensor]) -> ComposeWeights | None:
    """Put other tensors in the place of those that `_key_parts` lists."""
    if weights is None:
        return None
    return weights._replace(key=SideWeights(*(part if part is None else next(parts) for part in weights.key)))
