"""Checks of the fields of a `config.json`: known, of the right type, and with a supported value."""

import json
from collections.abc import Collection, Mapping

OF_THE_LIBRARY = {  # fields of Hugging Face's library without effect on the computation
    *("model_type", "architectures", "auto_map", "torch_dtype", "dtype", "transformers_version", "_name_or_path"),
    *("_attn_implementation_autoset", "use_cache", "return_dict", "output_attentions", "output_hidden_states"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "tokenizer_class"),
}


def check_known(content: Mapping, known: Collection[str]) -> None:
    """Raise ValueError if there are unknown fields."""
    unknown = sorted(set(content) - set(known) - OF_THE_LIBRARY)
    if unknown:
        raise ValueError(f"unknown fields {unknown}; nothing was loaded, because their effect is unknown.")


def check_types(fields: Mapping, types: Mapping[str, tuple[type, ...]]) -> None:
    """Raise ValueError if a field has the wrong type."""
    for name, accepted in types.items():
        if name in fields and type(fields[name]) not in accepted:
            words = " or ".join("null" if kind is type(None) else kind.__name__ for kind in accepted)
            raise ValueError(f"{name}={fields[name]!r} must be of type {words}.")


def check_values(fields: Mapping, accepted: Mapping[str, tuple]) -> None:
    """Raise ValueError if a field has an unsupported value."""
    for name, values in accepted.items():
        if fields[name] not in values:
            raise ValueError(f"{name}={fields[name]!r}; expected {' or '.join(map(json.dumps, values))}.")
