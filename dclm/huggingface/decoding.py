"""The decoding cache with the interface of Hugging Face's generation."""

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ..decoder import Decoder


class DecodingState(Cache):
    """Wrapper of a `DecodingCache`, which is created with the first tokens.

    Args:
        decoder: The model.
        capacity: Maximum tokens per row.
    """

    def __init__(self, decoder: Decoder, capacity: int) -> None:
        super().__init__(layers=[])
        self._decoder, self._capacity, self._cache = decoder, capacity, None

    def decode(self, input_ids: Tensor, attention_mask: Tensor | None, last_only: bool) -> Tensor:
        """Predict the tokens after new tokens: logits [B, T or 1, V].

        Raises:
            ValueError: If the mask differs from the padding before the first tokens.
        """
        check_mask(attention_mask, len(input_ids), self.get_seq_length() + input_ids.shape[1])
        padding = count_left_padding(attention_mask)
        if self._cache is None:
            self._cache = self._decoder.make_cache(self._capacity, padding)
        elif attention_mask is not None:
            self._check_mask(attention_mask, padding)
        return self._decoder.decode(input_ids, self._cache, last_only=last_only)

    def _check_mask(self, attention_mask: Tensor, padding: Tensor | None) -> None:
        kept = self._cache.clock.padding
        none = attention_mask.new_zeros(len(attention_mask))
        same = torch.equal(none if kept is None else kept, none if padding is None else padding)
        if not same:
            raise ValueError("attention_mask does not match the padding of the tokens in the cache.")

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens in the cache."""
        return 0 if self._cache is None else self._cache.num_tokens

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """Return the capacity."""
        return self._capacity

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows."""
        self._cache.reorder(beam_idx)

    def crop(self, max_length: int) -> None:
        """Not supported, because tokens overwritten in a window are lost."""
        raise NotImplementedError("this cache cannot be cropped (required for assisted generation).")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Not supported, because the rows of a cache are fixed."""
        raise NotImplementedError("the rows of this cache cannot be repeated.")

    def batch_select_indices(self, indices: Tensor) -> None:
        """Not supported, because the rows of a cache are fixed."""
        raise NotImplementedError("rows of this cache cannot be selected.")


def check_mask(attention_mask: Tensor | None, rows: int, tokens: int) -> None:
    """Check a padding mask.

    Raises:
        ValueError: If it is not [rows, tokens] of zeros and ones.
    """
    if attention_mask is None:
        return
    if not isinstance(attention_mask, Tensor) or attention_mask.shape != (rows, tokens):
        got = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else repr(attention_mask)
        raise ValueError(f"attention_mask is {got}; expected a tensor [{rows}, {tokens}] of 0 for padding, else 1.")
    if not bool(((attention_mask == 0) | (attention_mask == 1)).all()):
        raise ValueError("attention_mask has values other than 0 and 1.")


def count_left_padding(attention_mask: Tensor | None) -> Tensor | None:
    """Count the left padding of each row [B]; None if there is none.

    Raises:
        ValueError: If there is padding between or after tokens.
    """
    if attention_mask is None:
        return None
    real = attention_mask.bool()
    padding = (~real).sum(1)
    if not torch.equal(real, torch.arange(real.shape[1], device=real.device) >= padding[:, None]):
        raise ValueError(
            "attention_mask has padding after tokens; with a cache expected padding before tokens (padding_side)."
        )
    return padding if bool(padding.any()) else None


def padding_documents(attention_mask: Tensor | None) -> Tensor | None:
    """Convert a mask with padding on either side to document ids [B, T]: padding before, tokens, padding after.

    Raises:
        ValueError: If there is padding between tokens.
    """
    if attention_mask is None:
        return None
    real = attention_mask.long()
    changes = (real[:, 1:] != real[:, :-1]).long().cumsum(1)
    document_ids = torch.cat([torch.zeros_like(real[:, :1]), changes], 1)
    begins_real = real[:, :1]
    if bool((document_ids + begins_real > 2).any()):
        raise ValueError("attention_mask has padding between tokens; expected before and after them.")
    return document_ids if bool((real == 0).any()) else None
