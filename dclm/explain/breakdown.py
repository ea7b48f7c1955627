"""`dclm explain breakdown`: the composition of one pair of tokens, term by term (figures 7 and 8)."""

from functools import partial
from typing import Literal

import torch
from torch import Tensor

from dctrain.checkpointing.checkpoint import make_folder
from dctrain.errors import as_user_error
from dctrain.evaluation.run import find_dtype
from dctrain.explain.breakdown_report import QueryKeyPair, explain_breakdown, record_pair
from dctrain.explain.explanation import Explanation, origin_of, write_explanation
from dctrain.explain.selectors import find_layer, find_position

from ..load import LoadedModel, load_model
from .prompts import encode


def breakdown(
    checkpoint: str,
    prompt: str,
    layer: str | None = None,
    composition: Literal["pre", "post"] = "post",
    query: int = -1,
    key: int | None = None,
    out: str = "breakdown",
    tokenizer: str | None = None,
    device: str = "cpu",
    dtype: str | None = None,
) -> None:
    """Break the composition of the attention from one token to another into its terms, per head.

    Reports the terms of equation 7, the compose weights of the two tokens, and the attention of the heads before and
    after composition (figures 7 and 8). The maps of one layer at a time are in memory.

    Args:
        checkpoint: A model, as in `generate`.
        prompt: The text.
        layer: Name of the layer, or its index among all attention layers; default: the layer that changes the query's
            attention most.
        composition: "pre" for scores, "post" for attention weights.
        query: Position of the query; -1 is the last.
        key: Position of the key; default: the token whose attention changes most.
        out: Folder for breakdown.csv and breakdown.png.
        tokenizer: "bytes", a tokenizer.json or a hub name; default: the tokenizer of the checkpoint or folder.
        device: Device, such as cuda.
        dtype: "float32", "bfloat16" or "float16"; default: the dtype of the weights.

    Raises:
        UserError: If an input cannot be read, the layer or token does not exist, or the composition is disabled.
    """
    asked = locals().copy()
    folder = make_folder(out)
    model = load_model(checkpoint, tokenizer, dtype=find_dtype(dtype), device=device)
    ids, words = encode(model, prompt)
    with as_user_error(checkpoint, ValueError):
        found = breakdown_of(model, ids, words, layer, composition, query, key)
    write_explanation(found, folder, [origin_of(checkpoint, model.decoder)], asked)


@torch.inference_mode()
def breakdown_of(
    model: LoadedModel,
    ids: Tensor,
    words: tuple[str, ...],
    layer: str | None = None,
    composition: str = "post",
    query: int = -1,
    key: int | None = None,
) -> Explanation:
    """Break down a pair of tokens of a prompt [1, T]; other arguments as in `breakdown`.

    Raises:
        ValueError: If the layer does not exist or has no such composition.
        UserError: If the token does not exist.
    """
    query = find_position("query", query, len(words))
    layers = find_layer(model.decoder, layer, composition)
    call = partial(model.decoder.hidden_states, ids)
    chosen, recorded, most = record_pair(model.decoder, call, layers, composition, query)
    at = most if key is None else find_position("key", key, len(words))
    return explain_breakdown(recorded, QueryKeyPair(chosen, composition, query, at, words))
