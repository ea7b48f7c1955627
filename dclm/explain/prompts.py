"""A prompt and the token after it, as ids and as words."""

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
    """A prompt and what follows.

    Attributes:
        input_ids: The prompt [1, T], int64, on the model's device; what the tokenizer begins texts with included.
        target: Id of the token that follows.
        words: Each token as text [T + 1], the target's last.
        prompt: The prompt as it was given.
    """

    input_ids: Tensor
    target: int
    words: tuple[str, ...]
    prompt: str


@torch.no_grad()
def ask(model: LoadedModel, prompt: str, target: str | None) -> Question:
    """Encode a prompt and a target, the likeliest token if None.

    Raises:
        UserError: If the prompt has no token or too many, or the target is not one token.
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
            moved = "" if prompt == prompt.rstrip() else " The space that ends the prompt is the target's."
            raise UserError(_not_one(tokenizer, f"target={target!r}", continuation, target, spaced) + moved)
        ids, words = _as_input(model, prompt, context)
        (answer,) = continuation
    return Question(ids, answer, (*words, tokenizer.decode([answer])), prompt)


def encode(model: LoadedModel, prompt: str) -> tuple[Tensor, tuple[str, ...]]:
    """Encode a prompt: ids [1, T], int64, on the model's device, and each token as text.

    Raises:
        UserError: If the prompt has no token or too many.
    """
    tokenizer = model.tokenizer
    return _as_input(model, prompt, [*tokenizer.begin_ids, *tokenizer.encode([prompt])[0].tolist()])


def one_token(tokenizer: Tokenizer, word: str) -> int:
    """Encode a word that is one token.

    Raises:
        UserError: If it is not; with the pieces, and with a space before it if that would be one.
    """
    ids, spaced = (row.tolist() for row in tokenizer.encode([word, f" {word}"]))
    if len(ids) == 1:
        return ids[0]
    raise UserError(_not_one(tokenizer, repr(word), ids, word, spaced))


def _not_one(tokenizer: Tokenizer, named: str, ids: Sequence[int], word: str, spaced: Sequence[int]) -> str:
    """Say into which tokens a word falls, and whether with a space before it it is one."""
    pieces = [tokenizer.decode([token]) for token in ids]
    hint = f"; {' ' + word!r} is one" if len(spaced) == 1 else ""
    return f"{named} is {len(pieces)} tokens to this tokenizer, {pieces}; expected one{hint}."


def _as_input(model: LoadedModel, prompt: str, ids: list[int]) -> tuple[Tensor, tuple[str, ...]]:
    decoder, tokenizer = model
    if not ids:
        raise UserError(f"prompt={prompt!r} holds no token.")
    if len(ids) > decoder.config.context_length:
        raise UserError(f"prompt has {len(ids)} tokens; expected at most {decoder.config.context_length}.")
    return torch.tensor([ids], device=decoder.device), tuple(tokenizer.decode([token]) for token in ids)
