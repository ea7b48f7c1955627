"""Generation of captions, and exact-match accuracy."""

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
    """Generate a caption of each image; keys and values of the image are computed once.

    Args:
        model: A captioner.
        images: Normalized images [B, 3, size, size].
        tokenizer: Tokenizer of the captions.
        max_new_tokens: Maximum tokens per caption, including the end token.
        temperature: Sampling temperature; 0 for greedy decoding.
        top_p: Nucleus sampling: smallest set of top tokens whose probabilities sum to this.
        seed: Seed of sampling.
        num_beams: Number of beams; above 1 for beam search by log-probability per token.

    Returns:
        The captions, without begin and end tokens.

    Raises:
        ValueError: If the model is not a captioner, an option is out of range, or beam search is combined with
            sampling.
    """
    if not model.is_captioner:
        raise ValueError("the model is not a captioner: its text tower has no cross-attention.")
    begin = tokenizer.begin_ids or [tokenizer.eos_id]
    prompts = torch.tensor([begin] * len(images), device=images.device)
    context = model.context(model.encode_images(images))
    shared = {"stop_tokens": [tokenizer.eos_id], "context": context}
    if num_beams == 1:
        found = generate(model.text, prompts, max_new_tokens, temperature, top_p=top_p, seed=seed, **shared)
    elif temperature or top_p is not None:
        raise ValueError(f"{num_beams=} with {temperature=}, {top_p=}: beam search cannot be combined with sampling.")
    else:
        found = beam_search(model.text, prompts, max_new_tokens, num_beams, **shared)
    rows = [row[len(begin) :].tolist() for row in found]
    ended = [row[: row.index(tokenizer.eos_id)] if tokenizer.eos_id in row else row for row in rows]
    return [tokenizer.decode(row) for row in ended]


def exact_matches(told: list[str], captions: list[list[str]], tokenizer: Tokenizer) -> list[bool]:
    """Return which captions match a reference caption of their image, after tokenization."""
    known = [{tokenizer.decode(ids.tolist()) for ids in tokenizer.encode(of_image)} for of_image in captions]
    return [caption in ours for caption, ours in zip(told, known, strict=True)]
