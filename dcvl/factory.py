"""Building an image encoder with a text decoder from the settings of a run, without Lightning."""

from typing import Any

from torch import nn

from dclm import Decoder
from dclm.config import build_config
from dctrain.errors import UserError, as_user_error
from dcvision.factory import build_model

from .contrastive import Contrastive
from .network import ImageText
from .pooling import freeze_pooling


def build_pair(
    model: str,
    image_size: int,
    model_kwargs: dict[str, Any] | None,
    text_model: str,
    text_overrides: dict[str, Any] | None,
    vocab_size: int,
    context_length: int,
    cross_layers: int | None,
    cross_compose: bool,
    embed_dim: int,
    contrastive: Contrastive | None,
    caption_weight: float,
) -> ImageText:
    """Build an image encoder and a text decoder; arguments as in `VisionLanguageModel`.

    Raises:
        UserError: If a model is unknown, or arguments are inconsistent.
    """
    image = image_tower(model, image_size, model_kwargs or {})
    text = _text_tower(
        text_model, vocab_size, context_length, text_overrides or {}, image.num_features, cross_layers, cross_compose,
        contrastive, caption_weight,
    )  # fmt: skip
    with as_user_error():
        pair = ImageText(image, text, embed_dim if contrastive else None, contrastive or "sigmoid")
    if contrastive is None:
        freeze_pooling(image, image_size)
    return pair


def image_tower(name: str, image_size: int, model_kwargs: dict[str, Any]) -> nn.Module:
    """Build a timm model without its head.

    Raises:
        UserError: If it cannot be built.
    """
    tower = build_model(name, 0, image_size, model_kwargs)
    if not hasattr(tower, "forward_head"):
        raise UserError(f"model {name!r} has no forward_features.")
    return tower


def _text_tower(
    name: str, vocab_size: int, context_length: int, overrides: dict[str, Any], width: int, cross_layers: int | None,
    cross_compose: bool, contrastive: Contrastive | None, caption_weight: float,
) -> Decoder:  # fmt: skip
    """Build the text decoder, which attends to image patches of some width."""
    ours = sorted(set(overrides) & {"cross_layers", "cross_compose", "context_dim"})
    if ours:
        raise UserError(f"text_overrides must not contain {ours}: use cross_layers and cross_compose.")
    config = build_config(name, vocab_size, context_length, overrides)
    if not config.is_causal:
        raise UserError("text_overrides.is_causal=false: the text tower must be causal.")
    layers = cross_layers
    if layers is None:
        layers = 0 if not caption_weight else config.num_layers
        layers = layers if contrastive is None else layers // 2
    if caption_weight and not layers:
        raise UserError(
            f"the text tower has num_layers={config.num_layers}; both losses require at least two: texts are embedded "
            "before the cross-attention layers."
        )
    if layers:
        cross_options = {"context_dim": width, "cross_layers": layers, "cross_compose": cross_compose}
        config = build_config(name, vocab_size, context_length, overrides | cross_options)
    with as_user_error(f"text_model {name!r} cannot be built with {overrides}"):
        return Decoder(config)
