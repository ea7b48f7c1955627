"""Deriving the architecture of a new run from its initial weights (`dclm fit --init`)."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from dcmha.options import COMPOSE_OPTIONS
from dctrain.errors import UserError

from .config import CONFIGS, FAMILIES, OF_CHOICE, OF_TRAINING, DecoderConfig
from .load import load_config

SIZES_OF_DATA = ("vocab_size", "context_length")  # determined by data and weights, not by overrides


class Derived(NamedTuple):
    """A decoder's configuration in the form of `LanguageModel`.

    Attributes:
        model: Name of a configuration of its family.
        overrides: Fields that differ from it.
        vocab_size: Number of embedding rows.
    """

    model: str
    overrides: dict[str, Any]
    vocab_size: int


def derive_model(source: str, added: Mapping[str, Any]) -> Derived:
    """Derive the configuration from initial weights and additional fields.

    Args:
        source: A run or checkpoint of dclm, or a model folder.
        added: Fields of `DecoderConfig`: windows, training-only fields, and QK-norm and composition if the source has
            none.

    Raises:
        UserError: If there is no model, or a field contradicts it.
    """
    config = load_config(Path(source))
    free = {*OF_TRAINING, *OF_CHOICE}
    free |= set() if config.qk_norm else {"qk_norm"}
    free |= set() if config.is_composed else set(COMPOSE_OPTIONS)
    for name, value in added.items():
        theirs = getattr(config, name, None)
        if name not in free and value != (list(theirs) if isinstance(theirs, tuple) else theirs):
            raise UserError(
                f"model.overrides.{name}={value!r} contradicts init={source}, which has {theirs!r}; remove it, or "
                "set model.model to build a different model."
            )
    model = _nearest(config)
    return Derived(model, _differences(CONFIGS[model], config) | dict(added), config.vocab_size)


def _nearest(config: DecoderConfig) -> str:
    """Return the smallest plain configuration of the family that differs in the fewest fields."""
    names = [f"{plain}_debug" for plain, _ in FAMILIES]
    return min(names, key=lambda name: len(_differences(CONFIGS[name], config)))


def _differences(before: DecoderConfig, now: DecoderConfig) -> dict[str, Any]:
    pairs = {field.name: (getattr(before, field.name), getattr(now, field.name)) for field in fields(DecoderConfig)}
    different = {name: value for name, (old, value) in pairs.items() if value != old and name not in SIZES_OF_DATA}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in different.items()}
