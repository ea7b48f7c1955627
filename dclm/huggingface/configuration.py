"""Configurations in the published format, for Hugging Face's library."""

from typing import ClassVar

from transformers import PreTrainedConfig

from ..config import DecoderConfig
from ..hub.published_config import config_from_hub, config_to_hub, field_defaults


class PublishedConfig(PreTrainedConfig):
    """Fields as `config.json` of the published models has them (`dclm/README.md`).

    Args:
        **fields: Any of them, and what the library itself keeps in configurations.

    Raises:
        ValueError: If a value is outside what the format defines.
    """

    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "dim",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "block_size",
    }

    def __post_init__(self, **fields) -> None:
        """Keep the published fields, and leave the others to the library."""
        named = {self.attribute_map.get(name, name): value for name, value in fields.items()}
        for name, default in field_defaults({"model_type": self.model_type, **named}).items():
            setattr(self, name, named.pop(name, getattr(type(self), name, default)))
        super().__post_init__(**named)
        self.decoder_config()

    def decoder_config(self) -> DecoderConfig:
        """Translate it."""
        kind = {"model_type": self.model_type}
        return config_from_hub(kind | {name: getattr(self, name) for name in field_defaults(kind)})

    @classmethod
    def from_decoder_config(cls, config: DecoderConfig, **kwargs) -> "PublishedConfig":
        """Translate a decoder's configuration.

        Raises:
            ValueError: If the format has no word for a field's value, or the family is another.
        """
        content = config_to_hub(config)
        if content["model_type"] != cls.model_type:
            raise ValueError(f"the configuration is of model_type={content['model_type']!r}, not {cls.model_type!r}.")
        return cls(**{name: content[name] for name in field_defaults(content) if name in content}, **kwargs)


class DCFormerConfig(PublishedConfig):
    """DCFormer's: LLaMA style, composed or plain (`use_dcmha=False`)."""

    model_type = "dcformer"


class DCPythiaConfig(PublishedConfig):
    """DCPythia's: GPT-NeoX style, composed or plain (`use_dcmha=False`)."""

    model_type = "dcpythia"
