"""Plain decoders in Hugging Face's format: GPT-NeoX (Pythia) and Llama or Mistral, read into a `Decoder`.

Tensors correspond one to one, except the fused queries, keys and values: GPT-NeoX stores them per head, Llama in three
tensors. Tied embeddings are loaded as two equal tensors.
"""

# C model width, H heads, D head dim

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from ..config import PYTHIA, TRANSFORMER_PP, DecoderConfig
from .fields import check_known, check_types, check_values

SHAPE = {
    "hidden_size": "dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "mlp_dim",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "context_length",
}
BOTH = {  # None: required
    **dict.fromkeys(SHAPE, None),
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "rope_scaling": None,
    "partial_rotary_factor": None,
}
GPT_NEOX = BOTH | {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "use_parallel_residual": True,
    "attention_bias": True,
    "rotary_pct": 0.25,
    "rotary_emb_base": 10000,
}
LLAMA = BOTH | {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": None,
    "head_dim": None,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_theta": 10000.0,
    "sliding_window": None,
}
MISTRAL = {"sliding_window": 4096}
WITHOUT_EFFECT = (  # no effect on the logits
    *("initializer_range", "attention_dropout", "hidden_dropout", "classifier_dropout", "pretraining_tp"),
    *("is_decoder", "max_sequence_length"),
)
TYPES = {
    **dict.fromkeys(SHAPE, (int,)),
    **dict.fromkeys(("tie_word_embeddings", "use_parallel_residual", "attention_bias", "mlp_bias"), (bool,)),
    **dict.fromkeys(("layer_norm_eps", "rms_norm_eps", "rotary_pct", "rotary_emb_base", "rope_theta"), (int, float)),
    **dict.fromkeys(("num_key_value_heads", "head_dim", "sliding_window"), (int, type(None))),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), (dict, type(None))),
}


def neox_config(content: dict) -> DecoderConfig:
    """Convert the `config.json` of a "gpt_neox" model.

    Raises:
        ValueError: If a field is missing or unknown, or a value is not supported.
    """
    fields = _read(content, GPT_NEOX)
    check_values(fields, {"hidden_act": ("gelu",), "attention_bias": (True,)})
    rotary = _rotary(fields, fields["rotary_emb_base"], fields["rotary_pct"])
    residual = {"parallel_residual": fields["use_parallel_residual"]}
    return DecoderConfig(**PYTHIA | _shape(fields) | rotary | residual, norm_eps=fields["layer_norm_eps"])


def llama_config(content: dict) -> DecoderConfig:
    """Convert the `config.json` of a "llama" or "mistral" model.

    Raises:
        ValueError: As in `neox_config`.
    """
    fields = _read(content, LLAMA | MISTRAL if content["model_type"] == "mistral" else LLAMA)
    head_dim = fields["hidden_size"] // fields["num_attention_heads"]
    check_values(fields, {"hidden_act": ("silu",), "head_dim": (None, head_dim)})
    if fields["attention_bias"] != fields["mlp_bias"]:
        raise ValueError(
            f"attention_bias={fields['attention_bias']} and mlp_bias={fields['mlp_bias']}; expected equal values."
        )
    rotary = _rotary(fields, fields["rope_theta"], 1.0)
    return DecoderConfig(
        **TRANSFORMER_PP | _shape(fields) | rotary | {"bias": fields["mlp_bias"]},
        norm_eps=fields["rms_norm_eps"],
        num_kv_heads=fields["num_key_value_heads"],
        windows=(fields["sliding_window"],),
    )


def _read(content: Mapping, defaults: Mapping) -> dict:
    check_known(content, {*defaults, *WITHOUT_EFFECT})
    missing = [name for name in SHAPE if name not in content]
    if missing:
        raise ValueError(f"the fields {missing} are missing.")
    fields = {**defaults, **content}
    check_types(fields, TYPES)
    return fields


def _shape(fields: Mapping) -> dict:
    return {ours: fields[theirs] for theirs, ours in SHAPE.items()}


def _rotary(fields: Mapping, base: float, fraction: float) -> dict:
    """Read the rotary embedding from the older fields or from `rope_parameters`; scaling is not supported."""
    for name in ("rope_parameters", "rope_scaling"):
        kind = (fields[name] or {}).get("rope_type", (fields[name] or {}).get("type", "default"))
        if kind != "default":
            raise ValueError(f"{name} has rope_type={kind!r}; expected 'default' (frequencies without scaling).")
        check_known(fields[name] or {}, ("rope_type", "type", "rope_theta", "partial_rotary_factor"))
    given = fields["rope_parameters"] or fields["rope_scaling"] or {}
    partial = given.get("partial_rotary_factor", fields["partial_rotary_factor"])
    return {
        "rotary_base": float(given.get("rope_theta", base)),
        "rotary_fraction": float(fraction if partial is None else partial),
    }


TOP = {
    "neox": {"embed": "gpt_neox.embed_in", "norm": "gpt_neox.final_layer_norm", "output": "embed_out"},
    "llama": {"embed": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"},
}
LAYERS = {"neox": "gpt_neox.layers", "llama": "model.layers"}
WITHIN = {
    "neox": {
        "attn_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "attn.qkv": "attention.query_key_value",
        "attn.proj": "attention.dense",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    },
    "llama": {
        "attn_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "attn.qkv": "self_attn.qkv_proj",
        "attn.proj": "self_attn.o_proj",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    },
}
BUFFERS = (".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")  # in older files
SPLIT = tuple(f"self_attn.{letter}_proj" for letter in "qkv")
JOINED = WITHIN["llama"]["attn.qkv"]


def _named(name: str, family: str) -> str:
    """Convert a parameter name to the family's."""
    module, _, parameter = name.rpartition(".")
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)", module)
    if match is None:
        return f"{TOP[family][module]}.{parameter}"
    return f"{LAYERS[family]}.{match[1]}.{WITHIN[family][match[2]]}.{parameter}"


def prepare(tensors: dict[str, Tensor], config: DecoderConfig, content: Mapping) -> None:
    """Remove buffers, and convert alternatives in place: tied or renamed output layer, separate queries, keys,
    values."""
    family = _family(config)
    for name in [name for name in tensors if name.endswith(BUFFERS)]:
        del tensors[name]
    output, embed = (f"{TOP[family][module]}.weight" for module in ("output", "embed"))
    if family == "neox" and "lm_head.weight" in tensors:
        tensors[output] = tensors.pop("lm_head.weight")
    if content.get("tie_word_embeddings") and output not in tensors and embed in tensors:
        tensors[output] = tensors[embed].clone()
    for query in [name for name in tensors if f".{SPLIT[0]}." in name]:
        names = [query.replace(SPLIT[0], part) for part in SPLIT]
        if all(name in tensors for name in names):
            tensors[query.replace(SPLIT[0], JOINED)] = torch.cat([tensors.pop(name) for name in names])


def _family(config: DecoderConfig) -> str:
    return "neox" if config.mlp == "gelu" else "llama"


def weights_to_huggingface(weights: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """Convert a decoder's state dict to the family's tensors."""
    family = _family(config)
    order = (3, config.num_heads)
    return {
        _named(name, family): _reorder(tensor, order) if family == "neox" and ".qkv." in name else tensor
        for name, tensor in weights.items()
    }


def weights_from_huggingface(tensors: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """Convert the family's tensors, which must all be known, to a decoder's state dict."""
    family = _family(config)
    order = (config.num_heads, 3)
    weights = {}
    for theirs, tensor in tensors.items():
        name = _our_name(theirs, family)
        weights[name] = _reorder(tensor, order) if family == "neox" and ".qkv." in name else tensor
    return weights


def _our_name(name: str, family: str) -> str:
    """Convert the family's parameter name."""
    module, _, parameter = name.rpartition(".")
    match = re.fullmatch(rf"{re.escape(LAYERS[family])}\.(\d+)\.(.+)", module)
    if match is None:
        return f"{next(ours for ours, theirs in TOP[family].items() if theirs == module)}.{parameter}"
    return f"blocks.{match[1]}.{next(o for o, t in WITHIN[family].items() if t == match[2])}.{parameter}"


def _reorder(tensor: Tensor, order: tuple[int, int]) -> Tensor:
    """Exchange two axes fused in the first one: [a b D, ...] to [b a D, ...]."""
    return tensor.unflatten(0, (*order, -1)).transpose(0, 1).flatten(0, 2)
