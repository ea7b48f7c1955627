"""Beam search."""

# B prompts, T tokens of a prompt, K beams, V vocabulary

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dcmha.checks import check_integers, check_module, check_numbers

from .blocks import CrossContext
from .decoder import Decoder
from .generate import check_prompts

MAX_BEAMS, MAX_LENGTH_PENALTY = 1024, 20.0


@torch.no_grad()
def beam_search(
    decoder: Decoder,
    input_ids: Tensor,
    max_new_tokens: int,
    num_beams: int,
    *,
    length_penalty: float = 1.0,
    stop_tokens: Sequence[int] = (),
    context: CrossContext | None = None,
) -> list[Tensor]:
    """Find a continuation of each prompt whose log-probability over (number of new tokens)^`length_penalty` is highest.

    Args:
        decoder: The model.
        input_ids: Prompts of one length [B, T].
        max_new_tokens: Maximum number of new tokens per prompt, at least 1.
        num_beams: Number of beams K.
        length_penalty: 0 compares log-probabilities, which favors short continuations; 1 compares means per token.
        stop_tokens: A continuation ends with the first of these tokens.
        context: Context of the cross-attention layers, one row per prompt; for models with `cross_layers` only.

    Returns:
        Prompts with their continuations, of different lengths.

    Raises:
        TypeError: If `decoder` is not a `Decoder`.
        ValueError: As in `dclm.generate`, or if `num_beams`, `length_penalty` or `max_new_tokens` is out of range.
        MemoryError: If the cache cannot be allocated.
    """
    check_module(Decoder, decoder=decoder)
    try:
        input_ids = torch.as_tensor(input_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"input_ids: {error}; expected prompts of one length [B, T].") from error
    check_integers(num_beams=num_beams, max_new_tokens=max_new_tokens)
    if num_beams > MAX_BEAMS:
        raise ValueError(f"{num_beams=} must be at least 1 and at most {MAX_BEAMS}.")
    check_numbers(low=0, high=MAX_LENGTH_PENALTY, length_penalty=length_penalty)
    prompts = torch.stack(check_prompts(decoder, input_ids, max_new_tokens, stop_tokens)).to(decoder.device)
    cache = decoder.make_cache(prompts.shape[1] + max_new_tokens, context=context)
    beams = _Beams(len(prompts), num_beams, max_new_tokens, length_penalty, stop_tokens, decoder.device)
    logits = decoder.decode(prompts, cache, last_only=True)
    cache.repeat(num_beams)
    rows = beams.grow(logits[:, -1].repeat_interleave(num_beams, 0))
    while not beams.are_done():
        cache.reorder(rows)
        rows = beams.grow(decoder.decode(beams.last[:, None], cache)[:, -1])
    return [torch.cat([prompt, new]).to(input_ids.device) for prompt, new in zip(prompts, beams.ended, strict=True)]


class _Beams:
    """Active beams, and the best finished continuation, of each prompt.

    Attributes:
        tokens: New tokens of the beams [B, K, steps].
        scores: Log-probabilities of the beams [B, K]; -inf for unused beams.
        ended: The best finished continuation of each prompt.
    """

    def __init__(
        self, rows: int, num_beams: int, longest: int, penalty: float, stops: Sequence[int], device: torch.device
    ) -> None:
        self.longest, self.penalty = longest, float(penalty)
        self.stops = torch.tensor(list(stops), dtype=torch.long, device=device)
        self.tokens = torch.empty(rows, num_beams, 0, dtype=torch.long, device=device)
        self.scores = torch.full((rows, num_beams), -torch.inf, device=device)
        self.scores[:, 0] = 0.0  # all beams start with the same tokens
        self.ended = [self.tokens[0, 0]] * rows
        self.ended_scores = torch.full((rows,), -torch.inf, dtype=torch.float64, device=device)

    @property
    def last(self) -> Tensor:
        """The newest token of each beam [B K]."""
        return self.tokens[..., -1].flatten()

    def grow(self, logits: Tensor) -> Tensor:
        """Extend the beams by one token, given logits [B K, V]; return the source row of each beam [B K]."""
        B, K, steps = self.tokens.shape
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if logits.isnan().any():
            raise ValueError(f"the logits of new token {steps} have NaN: the weights are damaged or too large.")
        found = self.scores.to(logits.dtype)[..., None] + logits.log_softmax(-1).unflatten(0, (B, K))
        V = found.shape[-1]
        scores, places = found.flatten(1).topk(min(K * (1 + len(self.stops)), K * V))
        parents, chosen = places // V, places % V
        tokens = torch.cat([self.tokens.gather(1, parents[..., None].expand(-1, -1, steps)), chosen[..., None]], -1)
        ends = torch.isin(chosen, self.stops)
        self._end(tokens, scores.masked_fill(~ends, -torch.inf))
        going = scores.masked_fill(ends, -torch.inf).topk(min(K, scores.shape[1]))
        self.scores = F.pad(going.values, (0, K - going.values.shape[1]), value=-torch.inf)
        kept = F.pad(going.indices, (0, K - going.indices.shape[1]))
        self.tokens = tokens.gather(1, kept[..., None].expand(-1, -1, steps + 1))
        if steps + 1 == self.longest:
            self._end(self.tokens, self.scores)
        return (parents.gather(1, kept) + K * torch.arange(B, device=parents.device)[:, None]).flatten()

    def _end(self, tokens: Tensor, scores: Tensor) -> None:
        """Keep the best of finished continuations [B, candidates, steps] by score; -inf means not finished."""
        best, places = (scores.double() / tokens.shape[-1] ** self.penalty).max(1)
        for row in (best > self.ended_scores).nonzero().flatten().tolist():
            self.ended[row] = tokens[row, places[row]]
        self.ended_scores = torch.maximum(self.ended_scores, best)

    def are_done(self) -> bool:
        """Whether no active beam can beat the best finished continuation."""
        bound = self.scores.amax(1).double() / self.longest**self.penalty  # scores only decrease
        return self.tokens.shape[-1] == self.longest or bool((self.ended_scores >= bound).all())
