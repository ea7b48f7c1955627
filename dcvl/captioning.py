"""Telling captions of images, and how many are told exactly."""

# B images

import torch
from torch import Tensor

from dclm.beam_search import beam_search
from dclm.data.tokenizers import Tokenizer
from dclm.generate import generate

from .network import ImageText


@torch.no_grad()
def generate_captions(
    model: ImageText,
    images: Tensor,
    tokenizer: Tokenizer,
    max_new_tokens: int,
    temperature: float = 0.0,
    *,
    top_p: float | None = None,
    seed: int | None = None,
    num_beams: int = 1,
) -> list[str]:
    """Tell a caption of each image; what the layers that look at it make of an image is computed once.

    Args:
        model: A captioner.
        images: Normalised [B, 3, size, size].
        tokenizer: Of the captions.
        max_new_tokens: Most tokens of a caption, with what ends it.
        temperature: 0 takes the likeliest token; else logits are divided by it and sampled.
        top_p: Sample among the likeliest tokens whose probabilities first sum to this.
        seed: Seed of the samples.
        num_beams: More than 1 searches that many beams for the caption of the highest log-probability per token.

    Returns:
        The captions, what begins and what ends a text left out.

    Raises:
        ValueError: If the model tells nothing, an option is out of range, or beams are to be sampled.
    """
    if not model.is_captioner:
        raise ValueError("the model tells no captions: no layer of its text tower looks at the image.")
    begin = tokenizer.begin_ids or [tokenizer.eos_id]
    prompts = torch.tensor([begin] * len(images), device=images.device)
    context = model.context(model.encode_images(images))
    shared = {"stop_tokens": [tokenizer.eos_id], "context": context}
    if num_beams == 1:
        found = generate(model.text, prompts, max_new_tokens, temperature, top_p=top_p, seed=seed, **shared)
    elif temperature or top_p is not None:
        raise ValueError(f"{num_beams=} with {temperature=}, {top_p=}: beams are not sampled; expected one way.")
    else:
        found = beam_search(model.text, prompts, max_new_tokens, num_beams, **shared)
    rows = [row[len(begin) :].tolist() for row in found]
    ended = [row[: row.index(tokenizer.eos_id)] if tokenizer.eos_id in row else row for row in rows]
    return [tokenizer.decode(row) for row in ended]


def exact_matches(told: list[str], captions: list[list[str]], tokenizer: Tokenizer) -> list[bool]:
    """Tell which captions are, as the tokenizer writes them, among those of their image."""
    known = [{tokenizer.decode(ids.tolist()) for ids in tokenizer.encode(of_image)} for of_image in captions]
    return [caption in ours for caption, ours in zip(told, known, strict=True)]
