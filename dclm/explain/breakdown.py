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
    """Break what composition makes of the attention from one token to another into its terms, head by head.

    The terms are those of equation 7; with the weights that the two tokens bring, and what the heads look at before and
    after (figures 7 and 8). The maps of one layer at a time are in memory.

    Args:
        checkpoint: A model, as `generate` takes it.
        prompt: The text.
        layer: Name of the layer, or its number among all attention layers; the one that changes the query's attention
            most if left out.
        composition: "pre" breaks scores, "post" weights.
        query: Position of the token that looks, -1 the last.
        key: Position of the token that it looks at; that whose attention changes most if left out.
        out: Folder for breakdown.csv and breakdown.png.
        tokenizer: "bytes", a tokenizer.json or a hub name; by default the one in the checkpoint or folder.
        device: Where to run, such as cuda.
        dtype: "float32", "bfloat16" or "float16"; by default that of the weights.

    Raises:
        UserError: If something cannot be read, there is no such layer or token, or the model composes nothing there.
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
    """Break a pair of a prompt's tokens [1, T] down; other arguments as of `breakdown`.

    Raises:
        ValueError: If there is no such layer, or none with this composition.
        UserError: If there is no such token.
    """
    query = find_position("query", query, len(words))
    layers = find_layer(model.decoder, layer, composition)
    call = partial(model.decoder.hidden_states, ids)
    chosen, recorded, most = record_pair(model.decoder, call, layers, composition, query)
    at = most if key is None else find_position("key", key, len(words))
    return explain_breakdown(recorded, QueryKeyPair(chosen, composition, query, at, words))
