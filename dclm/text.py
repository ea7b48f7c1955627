"""Text in, text out: a trained or published model with its tokenizer, for the command line."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from dctrain.checkpoint import find_checkpoint, load_checkpoint
from dctrain.errors import UserError, told_as

from .data.tokenizers import Tokenizer, open_tokenizer, tokenizer_from_spec
from .decoder import Decoder
from .generate import check_prompts, stream
from .hub import load_pretrained
from .language_model import build_config
from .sampling import Sampling


def load_model(checkpoint: str, tokenizer: str | None) -> tuple[Decoder, Tokenizer]:
    """Load a decoder and its tokenizer.

    Args:
        checkpoint: A `.ckpt` file or run folder of `dclm fit`, or a folder in the published hub format.
        tokenizer: As `open_tokenizer` takes it; None takes the one in the checkpoint or folder.

    Raises:
        UserError: If there is none, or it is of another format.
    """
    if (Path(checkpoint) / "config.json").is_file():
        with told_as():
            decoder = load_pretrained(checkpoint)
        return decoder, open_tokenizer(tokenizer or checkpoint)
    path = find_checkpoint(checkpoint)
    content = load_checkpoint(path)
    hp, data = content.get("hyper_parameters", {}), content.get("TokenDataModule", {})
    if "model" not in hp or "context_length" not in hp or "state_dict" not in content:
        raise UserError(f"{path} is no checkpoint of dclm.")
    decoder = Decoder(build_config(hp["model"], hp["vocab_size"], hp["context_length"], hp["overrides"] or {}))
    weights = {k.removeprefix("model."): w for k, w in content["state_dict"].items() if k.startswith("model.")}
    decoder.load_state_dict(weights)
    return decoder.eval(), open_tokenizer(tokenizer) if tokenizer else tokenizer_from_spec(
        data["tokenizer"], data["eos"]
    )


def continue_text(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompts: list[str],
    max_new_tokens: int,
    sampling: Sampling,
    *,
    stop_at_eos: bool = True,
    seed: int | None = None,
    compile: bool = False,
) -> Iterator[list[str]]:
    """Yield, step by step, the text that each prompt's continuation grows by; "" for rows that have ended.

    Raises:
        UserError: At once, if a prompt is empty or does not fit the model.
    """
    with told_as("a prompt"):
        ids = [torch.from_numpy(row.astype("int64")) for row in tokenizer.encode(prompts)]
    stops = [tokenizer.eos_id] if stop_at_eos else []
    with told_as():
        ids = check_prompts(decoder, ids, max_new_tokens, stops)
    steps = stream(decoder, ids, max_new_tokens, sampling, stop_tokens=stops, seed=seed, compile=compile)
    return _written(steps, [tokenizer.stream() for _ in prompts], stops)


def _written(steps: Iterator[Tensor], writers: list[Callable[[int], str]], stops: list[int]) -> Iterator[list[str]]:
    """Turn new tokens [B] into new text."""
    ended = [False] * len(writers)
    while True:
        with told_as(of=ValueError):
            tokens = next(steps, None)
        if tokens is None:
            return
        texts = []
        for row, token in enumerate(tokens.tolist()):
            ended[row] = ended[row] or token in stops
            texts.append("" if ended[row] else writers[row](token))
        yield texts
