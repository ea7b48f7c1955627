"""Configurations for Hugging Face `transformers`, in the published format and in the native format."""

from typing import ClassVar

from transformers import PreTrainedConfig

from ..config import DecoderConfig, decoder_config
from ..hub.native import NATIVE_TYPE, config_from_native, config_to_native
from ..hub.published_config import config_from_hub, config_to_hub, field_defaults


class PublishedConfig(PreTrainedConfig):
    """Configuration with the fields of the published models' `config.json` (`docs/checkpoints.md`).

    Args:
        **fields: Any of them, and the fields of `transformers.PretrainedConfig`.

    Raises:
        ValueError: If a value is not defined by the format.
    """

    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "dim",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "block_size",
    }

    def __post_init__(self, **fields) -> None:
        """Set the published fields, and pass the others to the base class."""
        named = {self.attribute_map.get(name, name): value for name, value in fields.items()}
        for name, default in field_defaults({"model_type": self.model_type, **named}).items():
            setattr(self, name, named.pop(name, getattr(type(self), name, default)))
        super().__post_init__(**named)
        self.decoder_config()

    @classmethod
    def field_names(cls) -> set[str]:
        """Return the names of the fields that define the model."""
        return {*field_defaults({"model_type": cls.model_type})}

    def decoder_config(self) -> DecoderConfig:
        """Convert to a `DecoderConfig`."""
        kind = {"model_type": self.model_type}
        return config_from_hub(kind | {name: getattr(self, name) for name in field_defaults(kind)})

    @classmethod
    def from_decoder_config(cls, config: DecoderConfig, **kwargs) -> "PublishedConfig":
        """Create from a decoder's configuration.

        Raises:
            ValueError: If the format does not support a field's value, or the family differs.
        """
        content = config_to_hub(config)
        if content["model_type"] != cls.model_type:
            raise ValueError(f"the configuration is of model_type={content['model_type']!r}, not {cls.model_type!r}.")
        return cls(**{name: content[name] for name in field_defaults(content) if name in content}, **kwargs)


class DCFormerConfig(PublishedConfig):
    """Configuration of DCFormer: Llama style, composed or plain (`use_dcmha=False`)."""

    model_type = "dcformer"


class DCPythiaConfig(PublishedConfig):
    """Configuration of DCPythia: GPT-NeoX style, composed or plain (`use_dcmha=False`)."""

    model_type = "dcpythia"


DEFAULTS = config_to_native(decoder_config("dcformer_pp_debug"))  # the library creates configurations without arguments


class DCLMConfig(PreTrainedConfig):
    """Configuration with the fields of `DecoderConfig`: supports grouped-query attention, all branches, masked models.

    Args:
        **fields: Any of them, and the fields of `transformers.PretrainedConfig`.

    Raises:
        ValueError: If a value is out of range, the decoder has cross-attention (`cross_layers`), or
            `tie_word_embeddings` is true.
    """

    model_type = NATIVE_TYPE
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "dim",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
        "intermediate_size": "mlp_dim",
        "max_position_embeddings": "context_length",
    }

    def __post_init__(self, **fields) -> None:
        """Set the fields of `DecoderConfig`, and pass the others to the base class."""
        named = {self.attribute_map.get(name, name): value for name, value in fields.items()}
        if named.pop("tie_word_embeddings", False):
            raise ValueError("tie_word_embeddings=True; expected false, as decoders have a separate output layer.")
        for name in self.field_names():
            setattr(self, name, named.pop(name, DEFAULTS[name]))
        super().__post_init__(**named)
        self.decoder_config()

    @classmethod
    def field_names(cls) -> set[str]:
        """Return the names of the fields that define the model."""
        return DEFAULTS.keys() - {"model_type"}

    def to_diff_dict(self) -> dict:
        """Return all fields, including those with default values, so that a folder is self-contained."""
        written = self.to_dict()
        return super().to_diff_dict() | {name: written[name] for name in self.field_names()}

    def decoder_config(self) -> DecoderConfig:
        """Convert to a `DecoderConfig`."""
        config = config_from_native({name: getattr(self, name) for name in self.field_names()})
        if config.cross_layers:
            raise ValueError(f"cross_layers={config.cross_layers}: these classes do not support cross-attention.")
        return config

    @classmethod
    def from_decoder_config(cls, config: DecoderConfig, **kwargs) -> "DCLMConfig":
        """Create from a decoder's configuration."""
        content = config_to_native(config)
        return cls(**{name: content[name] for name in cls.field_names()}, **kwargs)
