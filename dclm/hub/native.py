"""`config.json` of the native format, which supports every decoder: the fields of `DecoderConfig`."""

from dataclasses import asdict, fields

from ..config import DecoderConfig
from .fields import check_known

NATIVE_TYPE = "dclm"


def config_to_native(config: DecoderConfig) -> dict:
    """Convert a configuration to the content of `config.json`."""
    return {"model_type": NATIVE_TYPE, **asdict(config)}


def config_from_native(content: dict) -> DecoderConfig:
    """Inverse of `config_to_native`.

    Raises:
        ValueError: If a field is unknown or missing, or a value out of range.
    """
    names = [field.name for field in fields(DecoderConfig)]
    check_known(content, names)
    missing = [name for name in names if name not in content]
    if missing:
        raise ValueError(f"fields {missing} are missing.")
    return DecoderConfig(**{name: content[name] for name in names})
