"""Log-likelihoods of continuations and of masked tokens in batches, with logits of the targets only."""

# B batch, T tokens, C model width, V vocabulary, M tokens of continuations, N tokens of one

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from dcmha.checks import check_integers, check_module, is_integer

from .data.masking import Masked
from .data.tokenizers import Tokenizer
from .decoder import Decoder
from .loss import IGNORED, Likelihood

Pair = tuple[Sequence[int], Sequence[int]]  # token ids of a context and of its continuation


def encode_pairs(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> list[Pair]:
    """Encode contexts with their continuations, as the lm-evaluation-harness does.

    Both are encoded together, so that words are not split between them; trailing spaces of a context belong to the
    continuation. An empty context is replaced by the token that begins a text: the tokenizer's, or the end token.
    """
    _check_pairs(pairs)
    wrong = next((pair for pair in pairs if not all(isinstance(text, str) for text in pair)), None)
    if wrong is not None:
        raise ValueError(f"pairs has {wrong!r}; expected pairs of context and continuation, both str.")
    moved = []
    for context, continuation in pairs:
        stripped = context.rstrip()
        moved.append((stripped, context[len(stripped) :] + continuation) if context else ("", continuation))
    contexts = tokenizer.encode([context for context, _ in moved])
    wholes = tokenizer.encode([context + continuation for context, continuation in moved])
    return [
        (_begun(tokenizer, is_empty=not len(context)) + context.tolist(), whole[len(context) :].tolist())
        for context, whole in zip(contexts, wholes, strict=True)
    ]


def _check_pairs(pairs: Sequence[Pair]) -> None:
    """Check that the items are pairs."""
    if not isinstance(pairs, Sequence) or isinstance(pairs, str):
        raise ValueError(f"pairs: expected a sequence of (context, continuation), not {type(pairs).__name__}.")
    for number, pair in enumerate(pairs):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ValueError(f"pairs[{number}]={pair!r}: expected (context, continuation).")


def _begun(tokenizer: Tokenizer, is_empty: bool) -> list[int]:
    return tokenizer.begin_ids or ([tokenizer.eos_id] if is_empty else [])


def cut_left(pair: Pair, num_tokens: int) -> Pair:
    """Truncate the context on the left to at most `num_tokens` in total.

    Raises:
        ValueError: If the continuation is longer.
    """
    context, continuation = pair
    if len(continuation) > num_tokens:
        raise ValueError(f"a continuation of {len(continuation)} tokens exceeds the context of {num_tokens}.")
    return context[max(0, len(context) + len(continuation) - num_tokens - 1) :], continuation


@torch.no_grad()
def log_likelihoods(decoder: Decoder, pairs: Sequence[Pair], *, batch_size: int = 8) -> list[Likelihood]:
    """Score continuations.

    Texts are processed longest first, in batches with right padding; pairs that share all tokens but the last are
    processed once. Logits are computed for the continuations only, in chunks, in max(dtype, float32).

    Args:
        decoder: The model, on any device.
        pairs: Token ids of contexts, at least one each, and of their continuations.
        batch_size: Texts per batch.

    Returns:
        One result per pair, in order, on the CPU.

    Raises:
        TypeError: If `decoder` is not a `Decoder`.
        ValueError: If the model is bidirectional, a context or continuation is empty, a token is outside of the
            vocabulary, the position table is too short, or a log-likelihood is NaN.
    """
    check_module(Decoder, decoder=decoder)
    _check_pairs(pairs)
    found: list[Likelihood | None] = [None] * len(pairs)
    for batch in batches(decoder, pairs, batch_size):
        for number, likelihood in score(decoder, batch):
            if likelihood.log_likelihoods.isnan().any():
                raise ValueError("the model's log-likelihoods have NaN: the weights are damaged or too large.")
            found[number] = likelihood
    return found


@dataclass
class Text:
    """Tokens of a text, and the pairs whose continuations end it: (index, start of the targets, targets)."""

    tokens: tuple[int, ...]
    pairs: list[tuple[int, int, list[int]]] = field(default_factory=list)


def batches(decoder: Decoder, pairs: Sequence[Pair], batch_size: int) -> list[list[Text]]:
    """Group pairs into batches; errors as in `log_likelihoods`."""
    decoder.check_causal()
    check_integers(batch_size=batch_size)
    _check_pairs(pairs)
    texts: dict[tuple[int, ...], Text] = {}
    for number, (context, continuation) in enumerate(pairs):
        _check(decoder, number, context, continuation)
        tokens = (*context, *continuation[:-1])
        text = texts.setdefault(tokens, Text(tokens))
        text.pairs.append((number, len(context) - 1, list(continuation)))
    longest_first = sorted(texts.values(), key=lambda text: -len(text.tokens))
    return [longest_first[start : start + batch_size] for start in range(0, len(longest_first), batch_size)]


def _check(decoder: Decoder, number: int, context: Sequence[int], continuation: Sequence[int]) -> None:
    for name, ids in (("context", context), ("continuation", continuation)):
        if (
            not isinstance(ids, Sequence | Tensor)
            or isinstance(ids, str)
            or not all(is_integer(i) for i in (ids.tolist() if isinstance(ids, Tensor) else ids))
        ):
            raise ValueError(f"the {name} of pair {number} is {ids!r}; expected token ids.")
        if len(ids) == 0:
            raise ValueError(f"the {name} of pair {number} is empty; expected at least one token.")
    low, high = min(min(context), min(continuation)), max(max(context), max(continuation))
    if low < 0 or high >= decoder.config.vocab_size:
        wrong = low if low < 0 else high
        raise ValueError(f"pair {number} has token {wrong}; expected 0 to {decoder.config.vocab_size - 1}.")


def score(decoder: Decoder, texts: Sequence[Text]) -> Iterator[tuple[int, Likelihood]]:
    """Process one batch; yield the likelihood of each pair with its index."""
    ids, places, targets = arrange(decoder, texts)
    scores, is_greedy = decoder.likelihood(ids, places, targets)
    pairs = [pair for text in texts for pair in text.pairs]
    lengths = [len(continuation) for *_, continuation in pairs]
    parts = zip(scores.cpu().split(lengths), is_greedy.cpu().split(lengths), strict=True)
    for (number, _, _), part in zip(pairs, parts, strict=True):
        yield number, Likelihood(*part)


def arrange(decoder: Decoder, texts: Sequence[Text]) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
    """Create a batch on the model's device.

    Returns:
        Token ids [B, T] with right padding; rows and columns of the predictions of continuations [M] each, by text and
        pair; target tokens [M].
    """
    longest = max(len(text.tokens) for text in texts)
    ids = torch.stack([F.pad(torch.tensor(text.tokens), (0, longest - len(text.tokens))) for text in texts])
    asked = [(row, start, continuation) for row, text in enumerate(texts) for _, start, continuation in text.pairs]
    places = [(row, start + i, target) for row, start, targets in asked for i, target in enumerate(targets)]
    rows, columns, targets = torch.tensor(places, device=decoder.device).unbind(1)
    return ids.to(decoder.device), (rows, columns), targets


@torch.no_grad()
def score_masked(decoder: Decoder, texts: Sequence[Masked]) -> list[Likelihood]:
    """Score the masked tokens of texts of any lengths with a bidirectional model.

    Returns:
        One result per text, on the CPU.
    """
    longest = max(len(text.input_ids) for text in texts)
    padded = [_padded(text, longest) for text in texts]
    ids, targets, document_ids = (torch.stack(rows).to(decoder.device) for rows in zip(*padded, strict=True))
    found = decoder(ids, targets=targets, document_ids=document_ids, per_token=True)
    lengths = (targets != IGNORED).sum(1).tolist()
    parts = zip(found.log_likelihoods.cpu().split(lengths), found.is_greedy.cpu().split(lengths), strict=True)
    return [Likelihood(*part) for part in parts]


def _padded(text: Masked, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pad a text; padding is a separate document, so that it is not attended to, and has no targets."""
    ids, targets = (torch.from_numpy(row) for row in text)
    padding = (0, longest - len(ids))
    document_ids = F.pad(torch.zeros_like(ids), padding, value=1)
    return F.pad(ids, padding), F.pad(targets, padding, value=IGNORED), document_ids
