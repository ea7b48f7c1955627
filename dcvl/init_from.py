"""Initial weights of a vision-language model: of both towers together, or separately."""

from contextlib import suppress
from dataclasses import replace

from torch import Tensor

from dclm.config import DecoderConfig, check_same
from dclm.data.tokenizers import Tokenizer
from dclm.load import load_decoder, load_model
from dctrain.checkpointing.init_from import check_initial, is_of_composition
from dctrain.errors import UserError
from dcvision.compat_checks import compare_heads, compare_normalization
from dcvision.init_from import read_initial as read_image_tower

from .load import is_pair, load_pair
from .network import ImageText


def read_initial(source: str, model: ImageText) -> tuple[dict[str, Tensor], list[str]]:
    """Read initial weights of both towers, and the names of parameters that keep their random initialization.

    Args:
        source: A checkpoint, run or export of `dcvl`; or "image=SOURCE", "text=SOURCE" or both, separated by a comma,
            where SOURCE is one of those or a source of initial weights for `dcvision` or `dclm`. In this case
            parameters outside of the towers keep their random initialization.
        model: The model.

    Raises:
        UserError: If there are no weights, or they do not match.
    """
    named = _towers(source)
    if named is None:
        theirs = load_pair(source).model
        compare_heads(f"init={source}", theirs.image, model.image)
        _compare_decoders(source, theirs.text.config, model.text.config)
        missing = check_initial(source, theirs.state_dict(), model, is_of_composition)
        compare_normalization(f"init={source}", theirs.image, model.image)
        return theirs.state_dict(), missing
    found = {f"{tower}.{name}": x for tower, own in named.items() for name, x in TOWERS[tower](own, model).items()}
    return found, [name for name in model.state_dict() if name not in found]


def check_tokenizer(source: str, tokenizer: Tokenizer) -> None:
    """Check that the initial text tower, if it has a tokenizer, has that of the run.

    Args:
        source: As in `read_initial`.
        tokenizer: Tokenizer of the run.

    Raises:
        UserError: If they differ.
    """
    named = _towers(source)
    if named is not None and "text" not in named:
        return
    theirs = _tokenizer_of(source if named is None else named["text"])
    if theirs is not None and theirs.spec != tokenizer.spec:
        raise UserError(
            f"init={source} was trained with a different tokenizer; expected that of this run (data.tokenizer)."
        )


def _towers(source: str) -> dict[str, str] | None:
    """Parse image=SOURCE,text=SOURCE; None for a source of both towers."""
    named = [part.partition("=")[::2] for part in source.split(",")]
    if not any(tower in TOWERS for tower, _ in named):
        return None
    if len(dict(named)) < len(named) or not dict(named).keys() <= TOWERS.keys() or not all(dict(named).values()):
        accepted = "a run or export of dcvl, or image=SOURCE,text=SOURCE, each once"
        raise UserError(f"init={source}; expected {accepted}.")
    return dict(named)


def _tokenizer_of(source: str) -> Tokenizer | None:
    """Return the tokenizer of a text tower; None if it has none."""
    if is_pair(source):
        return load_pair(source).tokenizer
    with suppress(UserError):  # other errors are raised when the weights are read
        return load_model(source).tokenizer
    return None


def _image_tower(source: str, model: ImageText) -> dict[str, Tensor]:
    """Read an image tower, also from a pair of towers."""
    if not is_pair(source):
        return read_image_tower(source, model.image)[0]
    tower = load_pair(source).model.image
    compare_heads(f"init=image={source}", tower, model.image)
    check_initial(source, tower.state_dict(), model.image, is_of_composition)
    compare_normalization(f"init=image={source}", tower, model.image)
    return tower.state_dict()


def _text_tower(source: str, model: ImageText) -> dict[str, Tensor]:
    """Read a decoder for the text tower; cross-attention layers may be missing."""
    decoder, ours = load_pair(source).model.text if is_pair(source) else load_decoder(source), model.text.config
    if not decoder.config.cross_layers:
        ours = replace(ours, context_dim=None, cross_layers=0, cross_compose=decoder.config.cross_compose)
    _compare_decoders(source, decoder.config, ours)
    check_initial(source, decoder.state_dict(), model.text, _may_be_drawn)
    return decoder.state_dict()


def _compare_decoders(source: str, theirs: DecoderConfig, ours: DecoderConfig) -> None:
    """Check that the weights of a text tower can be used; composition may be added."""
    if not theirs.cross_compose:
        ours = replace(ours, cross_compose=False)
    check_same(theirs, ours, f"init={source} has a different text tower", "data.tokenizer, model.text_model")


def _may_be_drawn(name: str) -> bool:
    return is_of_composition(name) or ".cross." in name or ".cross_norm." in name


TOWERS = {"image": _image_tower, "text": _text_tower}
