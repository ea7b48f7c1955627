"""Text generation with a model and its tokenizer."""

import sys
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dctrain.errors import as_user_error

from .data.tokenizers import Tokenizer
from .decoder import Decoder
from .generate import check_prompts, stream
from .sampling import Sampling
from .stop_strings import StopStringBuffer


def continue_text(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompts: list[str],
    max_new_tokens: int,
    sampling: Sampling,
    *,
    stop_at_eos: bool = True,
    stop_strings: Sequence[str] = (),
    seed: int | None = None,
    compile: bool = False,
) -> Iterator[list[str]]:
    """Yield the new text of each prompt's continuation per step; "" for finished rows.

    A row ends before the end token, or before the first stop string.

    Raises:
        UserError: Immediately, if a prompt is empty or invalid for the model, or a stop string is empty.
    """
    with as_user_error("a prompt"):
        rows = tokenizer.encode(prompts)
    ids = [torch.tensor([*tokenizer.begin_ids, *row.tolist()], dtype=torch.long) for row in rows]
    stops = [tokenizer.eos_id] if stop_at_eos else []
    with as_user_error():
        ids = check_prompts(decoder, ids, max_new_tokens, stops)
        texts = [StopStringBuffer(tokenizer, stops, stop_strings) for _ in prompts]
    longest = max(map(len, ids))
    if longest > decoder.config.context_length:
        message = (
            f"note: a prompt of {longest} tokens is longer than the training context of {decoder.config.context_length}"
        )
        print(message, file=sys.stderr, flush=True)
    grown: list[list[str]] = []

    def watch(tokens: list[int]) -> list[bool]:
        grown.append([text.add(token) for text, token in zip(texts, tokens, strict=True)])
        return [text.is_ended for text in texts]

    return _written(
        stream(decoder, ids, max_new_tokens, sampling, watch=watch, seed=seed, compile=compile), texts, grown
    )


def _written(
    steps: Iterator[tuple[Tensor, Tensor]], texts: list[StopStringBuffer], grown: list[list[str]]
) -> Iterator[list[str]]:
    """Run the steps; yield the text of each, and at the end the withheld text."""
    while True:
        with as_user_error(of=ValueError):
            step = next(steps, None)
        if step is None:
            yield [text.rest() for text in texts]
            return
        yield grown.pop()
