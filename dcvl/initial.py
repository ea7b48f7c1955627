"""Weights that two towers start from: of both together, or of each by itself."""

from dataclasses import replace

from torch import Tensor

from dclm.config import DecoderConfig, differing_fields
from dclm.load import load_decoder
from dctrain.errors import UserError
from dctrain.initial import check_initial, is_of_composition
from dcvision.initial import compare_heads
from dcvision.initial import read_initial as read_image_tower

from .load import load_pair
from .network import ImageText


def read_initial(source: str, model: ImageText) -> tuple[dict[str, Tensor], list[str]]:
    """Read weights for two towers, and the names of those that are drawn anew.

    Args:
        source: A checkpoint, run or export of `dcvl`; or "image=SOURCE", "text=SOURCE" or both, separated by a comma,
            with what `dcvision` and `dclm` start from. What joins the towers is drawn anew then.
        model: What they are for.

    Raises:
        UserError: If there are no weights, or they do not fit.
    """
    named = [part.partition("=")[::2] for part in source.split(",")]
    if not any(tower in TOWERS for tower, _ in named):
        theirs = load_pair(source).model
        compare_heads(source, theirs.image, model.image)
        _compare_decoders(source, theirs.text.config, model.text.config)
        return theirs.state_dict(), check_initial(source, theirs.state_dict(), model, is_of_composition)
    if len(dict(named)) < len(named) or not dict(named).keys() <= TOWERS.keys():
        accepted = "a run or export of dcvl, or image=SOURCE,text=SOURCE, each once"
        raise UserError(f"init={source}; accepted: {accepted}.")
    found = {f"{tower}.{name}": weight for tower, own in named for name, weight in TOWERS[tower](own, model).items()}
    return found, [name for name in model.state_dict() if name not in found]


def _image_tower(source: str, model: ImageText) -> dict[str, Tensor]:
    return read_image_tower(source, model.image)[0]


def _text_tower(source: str, model: ImageText) -> dict[str, Tensor]:
    """Read a decoder for the text tower; the layers that look at images may be missing."""
    decoder, ours = load_decoder(source), model.text.config
    if not decoder.config.cross_layers:
        ours = replace(ours, context_dim=None, cross_layers=0, cross_compose=decoder.config.cross_compose)
    _compare_decoders(source, decoder.config, ours)
    check_initial(source, decoder.state_dict(), model.text, _may_be_drawn)
    return decoder.state_dict()


def _compare_decoders(source: str, theirs: DecoderConfig, ours: DecoderConfig) -> None:
    """Refuse a text tower whose weights would mean something else; composition may be added."""
    if not theirs.cross_compose:
        ours = replace(ours, cross_compose=False)
    others = differing_fields(theirs, ours)
    if others:
        said = ", ".join(f"{name}={before!r}, here {now!r}" for name, (before, now) in others.items())
        raise UserError(f"init={source} has another text tower: {said} (data.tokenizer, model.text_model).")


def _may_be_drawn(name: str) -> bool:
    return is_of_composition(name) or ".cross." in name or ".cross_norm." in name


TOWERS = {"image": _image_tower, "text": _text_tower}
