"""Tensors of the published models to a `Decoder`'s state dict and back.

The published slots of the compose weights are (pre query, pre key, post query, post key); ours are side-major.
"""

# L layers, C model width, H heads, K = 4H hidden width of a slot's MLP, R = 2

import re
import warnings

import torch
from torch import Tensor

from .config import DecoderConfig

SLOTS = (0, 2, 1, 3)  # where our slots (query pre, query post, key pre, key post) are among the published ones

TOP = {"tok_embeddings": "embed", "norm": "norm", "output": "output"}
LAYER = {  # published name within a layer: ours within a block
    "attention_norm": "attn_norm",
    "ffn_norm": "mlp_norm",
    "attention.wqkv": "attn.qkv",
    "attention.wo": "attn.proj",
    "attention.q_norm": "attn.q_norm",
    "attention.k_norm": "attn.k_norm",
    "feed_forward.w2": "mlp.down",
    "feed_forward.mg": "mlp.group_gate",
}
MLP = {"swiglu": {"w1": "mlp.gate", "w3": "mlp.up"}, "gelu": {"w1": "mlp.up"}}
COMPOSE = ("dw1", "qkw", "dd")
DERIVED = ("dw_m", "qkw_m", "pre_proj.w", "post_proj.w")  # copies of the others in another order, and identities


def _layer_names(config: DecoderConfig) -> dict[str, str]:
    mlp = {f"feed_forward.{theirs}": ours for theirs, ours in MLP[config.mlp].items()}
    return LAYER | mlp


def weights_from_hub(tensors: dict[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """Rename and rearrange; names that are not known are kept, for the caller to report."""
    names = _layer_names(config)
    weights: dict[str, Tensor] = {}
    layers: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = re.fullmatch(r"layers\.(\d+)\.(.+)", key)
        if match:
            layers.setdefault(match[1], {})[match[2]] = tensor
        else:
            module, _, parameter = key.rpartition(".")
            weights[f"{TOP.get(module, module)}.{parameter}"] = tensor
    for number, layer in layers.items():
        _join_qkv(layer)
        for key, tensor in _compose_from_hub(layer, config).items():
            weights[f"blocks.{number}.attn.compose.{key}"] = tensor
        for key, tensor in layer.items():
            module, _, parameter = key.rpartition(".")
            parameter = "weight" if parameter == "scale" else parameter
            ours = names.get(module)
            weights[f"blocks.{number}.{ours}.{parameter}" if ours else f"layers.{number}.{key}"] = tensor
    return weights


def _join_qkv(layer: dict[str, Tensor]) -> None:
    """Replace the legacy wq, wk, wv by wqkv."""
    for parameter in ("weight", "bias"):
        keys = [f"attention.w{letter}.{parameter}" for letter in "qkv"]
        if all(key in layer for key in keys):
            layer[f"attention.wqkv.{parameter}"] = torch.cat([layer.pop(key) for key in keys])


def _compose_from_hub(layer: dict[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """Take the compose weights out of a layer: none without composition, the query's slots for query-wise models."""
    prefix = "attention.dyn_w_proj."
    derived = {name: layer.pop(prefix + name) for name in DERIVED if prefix + name in layer}
    given = {name: layer.pop(prefix + name) for name in COMPOSE if prefix + name in layer}
    if not config.is_composed:
        return {}
    _check_shapes(given, config)
    _compare_derived(given, derived)
    slots = list(SLOTS if config.key_wise else SLOTS[:2])
    compose = {}
    if "dw1" in given:
        compose["hidden"] = given["dw1"][:, 0, slots].permute(1, 2, 0).flatten(0, 1).contiguous()  # [slots * K, C]
    if "qkw" in given:
        compose["project"] = given["qkw"][0, slots].flatten(2)  # [slots, K, 2RH]
    if "dd" in given:
        by_slot = given["dd"][:, 0].unflatten(1, (4, -1))  # [C, 4, H]
        compose["gate"] = by_slot[:, slots].permute(1, 2, 0).flatten(0, 1).contiguous()  # [slots * H, C]
    return compose


def _check_shapes(given: dict[str, Tensor], config: DecoderConfig) -> None:
    C, H = config.dim, config.num_heads
    for name, shape in {"dw1": (C, 1, 4, 4 * H), "qkw": (1, 4, 4 * H, 4, H), "dd": (C, 1, 4 * H)}.items():
        if name in given and given[name].shape != shape:
            raise ValueError(f"dyn_w_proj.{name} has shape {list(given[name].shape)}; accepted: {list(shape)}.")


def _compare_derived(given: dict[str, Tensor], derived: dict[str, Tensor]) -> None:
    """Report copies that differ from their originals: the published training code updates the copies alone."""
    if not all(name in given for name in COMPOSE):
        return
    expected = _derive(given["dw1"], given["qkw"], given["dd"])
    different = [name for name in DERIVED[:2] if name in derived and not torch.equal(derived[name], expected[name])]
    if different:
        warnings.warn(
            f"{' and '.join(different)} differ from the dw1, qkw and dd they derive from; loaded the latter, as the "
            "published inference code does.",
            stacklevel=2,
        )


def _derive(dw1: Tensor, qkw: Tensor, dd: Tensor) -> dict[str, Tensor]:
    return {"dw_m": torch.cat([dw1.flatten(1), dd.flatten(1)], 1), "qkw_m": qkw[0].flatten(2).clone()}


def weights_to_hub(weights: dict[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """Rename and rearrange a decoder's state dict; derived tensors are made as the published code makes them."""
    top = {ours: theirs for theirs, ours in TOP.items()}
    names = {ours: theirs for theirs, ours in _layer_names(config).items()}
    tensors: dict[str, Tensor] = {}
    compose: dict[str, dict[str, Tensor]] = {}
    for key, tensor in weights.items():
        module, _, parameter = key.rpartition(".")
        match = re.fullmatch(r"blocks\.(\d+)\.(.+)", module)
        if match and match[2] == "attn.compose":
            compose.setdefault(match[1], {})[parameter] = tensor
        elif match:
            parameter = "scale" if match[2] in ("attn.q_norm", "attn.k_norm") else parameter
            tensors[f"layers.{match[1]}.{names[match[2]]}.{parameter}"] = tensor
        else:
            tensors[f"{top[module]}.{parameter}"] = tensor
    for number, parameters in compose.items():
        for name, tensor in _compose_to_hub(parameters, config).items():
            tensors[f"layers.{number}.attention.dyn_w_proj.{name}"] = tensor
    return tensors


def _compose_to_hub(compose: dict[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """Make a layer's published compose tensors; a key side that is off becomes zeros, which compose nothing."""
    C, H = config.dim, config.num_heads
    K = 4 * H
    slots = list(SLOTS if config.key_wise else SLOTS[:2])
    hidden, project, gate = compose["hidden"], compose["project"], compose["gate"]
    dw1, qkw, dd = hidden.new_zeros(C, 1, 4, K), hidden.new_zeros(1, 4, K, 4, H), hidden.new_zeros(C, 4, H)
    dw1[:, 0, slots] = hidden.view(len(slots), K, C).permute(2, 0, 1)
    qkw[0, slots] = project.view(len(slots), K, 4, H)
    dd[:, slots] = gate.view(len(slots), H, C).permute(2, 0, 1)
    identity = torch.eye(H, dtype=hidden.dtype).unsqueeze(0)
    originals = {"dw1": dw1, "qkw": qkw, "dd": dd.flatten(1).unsqueeze(1)}
    return originals | _derive(**originals) | {"pre_proj.w": identity, "post_proj.w": identity.clone()}
