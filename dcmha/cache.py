"""Decoding caches: keys, values and the key side of the compose weights, in ring buffers for windowed layers.

The key side is kept as low-rank factors and gates, 2(2R+1)H numbers a token and layer; merging it into matrices would
take 2 H^2. Buffers have a fixed size and the position is a tensor, so that a decode step compiles once.
"""

# B batch, T query tokens, S key tokens, H heads, D head dim, R compose rank

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .attention import KeyWeights
from .weights import TokenWeights


class Clock:
    """How far decoding is: what the layers' caches share.

    Attributes:
        end: Tokens (padding included) up to and with the current call, an integer tensor of no axes; None before.
        padding: Padding tokens before each row's prompt [B], or None for none.
    """

    def __init__(self, padding: Tensor | None) -> None:
        self.end: Tensor | None = None
        self.padding = padding

    def real(self, positions: Tensor) -> Tensor:
        """Tell which positions [S] hold a token of each row: [B, 1, 1, S], or [1, 1, 1, S] without padding."""
        if self.padding is None:
            return (positions >= 0)[None, None, None]
        return (positions >= self.padding[:, None])[:, None, None]


class LayerCache:
    """The cache of one layer; fulfils `AttentionCache`. For inference: what it keeps carries no gradient.

    Args:
        num_slots: Tokens kept; older ones are overwritten. A window of W needs W.
        clock: Shared with the other layers.
    """

    def __init__(self, num_slots: int, clock: Clock) -> None:
        self.num_slots, self.clock = num_slots, clock
        self.kept: list[Tensor] | None = None

    def update(self, k: Tensor, v: Tensor, key_weights: KeyWeights) -> tuple[Tensor, Tensor, KeyWeights, Tensor | None]:
        """Add new keys, values [B, H, T, D] and their compose weights; return all that the new queries may see.

        They come in the order of their tokens, or for T = 1 in any order, so that the layer's own `is_causal` and
        `window` hold; the mask [B or 1, 1, 1, S] hides empty slots and padding.

        Raises:
            ValueError: If the dtype is another than before.
        """
        new, pack = _flatten(k, v, key_weights)
        T = k.shape[2]
        positions = self.clock.end - T + torch.arange(T, device=k.device)
        if self.kept is None:
            self.kept = [x.new_zeros(x.shape[0], self.num_slots, *x.shape[2:]) for x in new]
            self._write(new, positions)
            mask = None if self.clock.padding is None else self.clock.real(positions)
            return *pack(new), mask
        if self.kept[0].dtype != k.dtype:
            raise ValueError(f"the cache holds {self.kept[0].dtype}; got {k.dtype}.")
        if T == 1:
            self._write(new, positions)
            slots = torch.arange(self.num_slots, device=k.device)
            return *pack(self.kept), self.clock.real(positions - (positions - slots) % self.num_slots)
        seen, seen_positions = self._after_kept(new, positions)
        self._write(new, positions)
        return *pack(seen), self.clock.real(seen_positions)

    def _after_kept(self, new: list[Tensor], positions: Tensor) -> tuple[list[Tensor], Tensor]:
        """Put new tokens after the kept ones, in order; return all with their positions, negative for empty slots."""
        before = positions[0] - self.num_slots + torch.arange(self.num_slots, device=positions.device)
        slots = before % self.num_slots
        seen = [torch.cat([old[:, slots], x], 1) for old, x in zip(self.kept, new, strict=True)]
        return seen, torch.cat([before, positions])

    def _write(self, new: list[Tensor], positions: Tensor) -> None:
        """Put the newest tokens into their slots."""
        slots = positions[-self.num_slots :] % self.num_slots
        for kept, x in zip(self.kept, new, strict=True):
            kept.index_copy_(1, slots, x[:, -self.num_slots :].detach())


class DecodingCache:
    """The caches of all layers of a decoder.

    Args:
        windows: Window of each layer, or None where it sees all.
        capacity: Most tokens of a row, padding included.
        padding: Padding tokens before each row's prompt [B], so that all prompts end together; None for none.

    Raises:
        ValueError: If `capacity` is less than 1.
    """

    def __init__(self, windows: Sequence[int | None], capacity: int, padding: Tensor | None = None) -> None:
        if capacity < 1:
            raise ValueError(f"capacity={capacity} must be at least 1.")
        self.windows, self.capacity = tuple(windows), capacity
        self.num_tokens = 0
        self.num_rows: int | None = None
        self.is_broken = False
        self.clock = Clock(padding)
        self.layers = [LayerCache(min(window or capacity, capacity), self.clock) for window in windows]

    def advance(self, num_rows: int, num_tokens: int, device: torch.device) -> Tensor:
        """Make room for new tokens, before the layers see them; return their positions in the text.

        Args:
            num_rows: Rows B.
            num_tokens: New tokens T of every row.
            device: Where the decoder runs.

        Returns:
            [T], or [B, T] if rows have padding; 0 for padding itself.

        Raises:
            ValueError: If they exceed the capacity, the rows are others than before, or the cache is broken.
        """
        if self.is_broken:
            raise ValueError("a call that failed left the cache half written; make a new one.")
        expected = self.num_rows if self.clock.padding is None else len(self.clock.padding)
        if expected not in (None, num_rows):
            raise ValueError(f"the cache is of {expected} rows; got {num_rows}.")
        if self.num_tokens + num_tokens > self.capacity:
            raise ValueError(
                f"the cache holds {self.capacity} tokens; {self.num_tokens} are in it and {num_tokens} more do not fit."
            )
        self.num_rows = num_rows
        self.num_tokens += num_tokens
        if self.clock.end is None:
            self.clock.end = torch.zeros((), dtype=torch.long, device=device)
            if self.clock.padding is not None:
                self.clock.padding = self.clock.padding.to(device)
        self.clock.end.fill_(self.num_tokens)
        positions = self.clock.end - num_tokens + torch.arange(num_tokens, device=device)
        if self.clock.padding is None:
            return positions
        return (positions - self.clock.padding[:, None]).clamp(min=0)


def _flatten(k: Tensor, v: Tensor, key_weights: KeyWeights) -> tuple[list[Tensor], Callable[[list[Tensor]], tuple]]:
    """List the tensors with tokens on axis 1, and give the function that puts such a list together again."""
    shape = [] if key_weights is None else [[part is not None for part in weights] for weights in key_weights]
    parts = [part for weights in key_weights or [] for part in weights if part is not None]

    def pack(tensors: list[Tensor]) -> tuple[Tensor, Tensor, KeyWeights]:
        k, v, *rest = tensors
        rest = iter(rest)
        weights = [TokenWeights(*(next(rest) if is_there else None for is_there in parts)) for parts in shape]
        return k.transpose(1, 2), v.transpose(1, 2), None if key_weights is None else weights

    return [k.transpose(1, 2), v.transpose(1, 2), *parts], pack
