"""Encoding of a prompt and the token after it."""

# T tokens

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dctrain.errors import UserError, as_user_error

from ..data.tokenizers import Tokenizer
from ..likelihood import encode_pairs
from ..load import LoadedModel


class Question(NamedTuple):
    """A prompt and the target token.

    Attributes:
        input_ids: The prompt [1, T], int64, on the model's device, including tokens that begin a text.
        target: Id of the target token.
        words: Text of each token [T + 1], the target last.
        prompt: The given prompt.
    """

    input_ids: Tensor
    target: int
    words: tuple[str, ...]
    prompt: str


@torch.no_grad()
def ask(model: LoadedModel, prompt: str, target: str | None) -> Question:
    """Encode a prompt and a target; the predicted token if None.

    Raises:
        UserError: If the prompt is empty or too long, or the target is not a single token.
    """
    decoder, tokenizer = model
    with as_user_error("the next token", ValueError):
        decoder.check_causal()
    if target is None:
        ids, words = encode(model, prompt)
        answer = int(decoder(ids)[0, -1].argmax())
    else:
        (context, continuation), (_, spaced) = encode_pairs(tokenizer, [(prompt, target), (prompt, f" {target}")])
        if len(continuation) != 1:
            moved = "" if prompt == prompt.rstrip() else " The trailing space of the prompt is part of the target."
            raise UserError(_not_one(tokenizer, f"target={target!r}", continuation, target, spaced) + moved)
        ids, words = _as_input(model, prompt, context)
        (answer,) = continuation
    return Question(ids, answer, (*words, tokenizer.decode([answer])), prompt)


def encode(model: LoadedModel, prompt: str) -> tuple[Tensor, tuple[str, ...]]:
    """Encode a prompt: ids [1, T], int64, on the model's device, and the text of each token.

    Raises:
        UserError: If the prompt is empty or too long.
    """
    tokenizer = model.tokenizer
    return _as_input(model, prompt, [*tokenizer.begin_ids, *tokenizer.encode([prompt])[0].tolist()])


def one_token(tokenizer: Tokenizer, word: str) -> int:
    """Encode a word that is a single token.

    Raises:
        UserError: If it is not; the message has the pieces, and suggests a leading space if that would be a single
            token.
    """
    ids, spaced = (row.tolist() for row in tokenizer.encode([word, f" {word}"]))
    if len(ids) == 1:
        return ids[0]
    raise UserError(_not_one(tokenizer, repr(word), ids, word, spaced))


def _not_one(tokenizer: Tokenizer, named: str, ids: Sequence[int], word: str, spaced: Sequence[int]) -> str:
    """Describe the tokens of a word, and whether it is a single token with a leading space."""
    pieces = [tokenizer.decode([token]) for token in ids]
    hint = f"; {' ' + word!r} is a single token" if len(spaced) == 1 else ""
    return f"{named} is {len(pieces)} tokens for this tokenizer, {pieces}; expected one{hint}."


def _as_input(model: LoadedModel, prompt: str, ids: list[int]) -> tuple[Tensor, tuple[str, ...]]:
    decoder, tokenizer = model
    if not ids:
        raise UserError(f"prompt={prompt!r} has no tokens.")
    if len(ids) > decoder.config.context_length:
        raise UserError(f"prompt has {len(ids)} tokens; expected at most {decoder.config.context_length}.")
    return torch.tensor([ids], device=decoder.device), tuple(tokenizer.decode([token]) for token in ids)
