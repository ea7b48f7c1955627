"""Conversion between the tensors of the published models and a `Decoder`'s state dict.

The published order of the compose weights' roles is (pre query, pre key, post query, post key); a `Decoder`'s is
side-major.
"""

# L layers, C model width, H heads, K = 4H hidden width of a role's MLP, R = 2

import re
import warnings

import torch
from torch import Tensor

from ..config import DecoderConfig

ROLES = (0, 2, 1, 3)  # index of our roles (query pre, query post, key pre, key post) among the published ones

TOP = {"tok_embeddings": "embed", "norm": "norm", "output": "output"}
LAYER = {  # published name within a layer: name within a block
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
COMPOSE = ("dyn_w_proj.dw1", "dyn_w_proj.qkw", "dyn_w_proj.dd")
# reordered copies of the other tensors, and identities
DERIVED = ("dyn_w_proj.dw_m", "dyn_w_proj.qkw_m", "dyn_w_proj.pre_proj.w", "dyn_w_proj.post_proj.w")


def _layer_names(config: DecoderConfig) -> dict[str, str]:
    mlp = {f"feed_forward.{theirs}": ours for theirs, ours in MLP[config.mlp].items()}
    return LAYER | mlp


def join_qkv(tensors: dict[str, Tensor]) -> None:
    """Replace the legacy wq, wk, wv by wqkv.

    Raises:
        ValueError: If a layer has both forms.
    """
    for query in [name for name in tensors if re.search(r"\.wq\.(weight|bias)$", name)]:
        names = [query.replace(".wq.", f".w{letter}.") for letter in "qkv"]
        joined = query.replace(".wq.", ".wqkv.")
        if joined in tensors:
            raise ValueError(f"the weights have both {joined} and {query}.")
        if all(name in tensors for name in names):
            tensors[joined] = torch.cat([tensors.pop(name) for name in names])


def compare_derived(tensors: dict[str, Tensor], config: DecoderConfig) -> None:
    """Warn about derived tensors that differ from their originals; the published training code updates only them."""
    different = set()
    for name in [name for name in tensors if name.endswith(COMPOSE[0])] if config.is_composed else []:
        layer = name.removesuffix(COMPOSE[0])
        expected = _derive(*(tensors[layer + original] for original in COMPOSE))
        for key, tensor in expected.items():
            given = tensors.get(layer + key)
            if given is not None and not torch.equal(given, tensor.to(given.dtype)):
                different.add(key)
    if different:
        warnings.warn(
            f"{', '.join(sorted(different))} differ from their originals dw1, qkw and dd; loaded the latter, as the "
            "published inference code does.",
            stacklevel=3,
        )


def _derive(dw1: Tensor, qkw: Tensor, dd: Tensor) -> dict[str, Tensor]:
    identity = torch.eye(qkw.shape[-1], dtype=qkw.dtype, device=qkw.device).unsqueeze(0)
    tensors = (torch.cat([dw1.flatten(1), dd.flatten(1)], 1), qkw[0].flatten(2).clone(), identity, identity.clone())
    return dict(zip(DERIVED, tensors, strict=True))


def weights_from_hub(tensors: dict[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """Convert published tensors, which must all be known, to a decoder's state dict."""
    names = _layer_names(config)
    weights: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        match = re.fullmatch(r"layers\.(\d+)\.(.+)", key)
        module, _, parameter = key.rpartition(".")
        if match is None:
            weights[f"{TOP[module]}.{parameter}"] = tensor
        elif ".dyn_w_proj." in key:
            ours = _compose_from_hub(match[2].removeprefix("attention."), tensor, config)
            weights |= {f"blocks.{match[1]}.attn.compose.{name}": rearranged for name, rearranged in ours.items()}
        else:
            module, _, parameter = match[2].rpartition(".")
            weights[f"blocks.{match[1]}.{names[module]}.{'weight' if parameter == 'scale' else parameter}"] = tensor
    return weights


def _compose_from_hub(name: str, tensor: Tensor, config: DecoderConfig) -> dict[str, Tensor]:
    """Convert one compose tensor: only the query's roles for query-wise models; nothing for plain models and derived
    tensors.
    """
    roles = list(ROLES if config.key_wise else ROLES[:2])
    if name not in COMPOSE or not config.is_composed:
        return {}
    if name == COMPOSE[0]:
        return {"hidden": tensor[:, 0, roles].permute(1, 2, 0).flatten(0, 1).contiguous()}  # [roles * K, C]
    if name == COMPOSE[1]:
        return {"project": tensor[0, roles].flatten(2)}  # [roles, K, 2RH]
    by_role = tensor[:, 0].unflatten(1, (4, -1))  # [C, 4, H]
    return {"gate": by_role[:, roles].permute(1, 2, 0).flatten(0, 1).contiguous()}  # [roles * H, C]


def weights_to_hub(weights: dict[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """Convert a decoder's state dict to published tensors, including derived ones."""
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
            tensors[f"layers.{number}.attention.{name}"] = tensor
    return tensors


def _compose_to_hub(compose: dict[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """Convert a layer's compose weights; a disabled key side is written as zeros, which have no effect."""
    C, H = config.dim, config.num_heads
    K = 4 * H
    roles = list(ROLES if config.key_wise else ROLES[:2])
    hidden, project, gate = compose["hidden"], compose["project"], compose["gate"]
    dw1, qkw, dd = hidden.new_zeros(C, 1, 4, K), hidden.new_zeros(1, 4, K, 4, H), hidden.new_zeros(C, 4, H)
    dw1[:, 0, roles] = hidden.view(len(roles), K, C).permute(2, 0, 1)
    qkw[0, roles] = project.view(len(roles), K, 4, H)
    dd[:, roles] = gate.view(len(roles), H, C).permute(2, 0, 1)
    originals = (dw1, qkw, dd.flatten(1).unsqueeze(1))
    return dict(zip(COMPOSE, originals, strict=True)) | _derive(*originals)
