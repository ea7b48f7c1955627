"""Composed counterparts of timm's attention modules equal the originals if all compose weights are zero."""

import pytest
import torch
from timm.layers import AttentionPoolLatent
from timm.layers.attention import Attention, AttentionRope
from timm.models.eva import EvaAttention
from torch import nn

from dcvision.timm_attention import FAMILIES, ComposedPooling

B, T, C, H, D = 2, 7, 48, 6, 8
PREFIX = 2


def randomized(module: nn.Module) -> nn.Module:
    """Add noise to every parameter, so that no parameter has a value that hides its effect."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module.eval()


def adopt(module: nn.Module) -> nn.Module:
    adopted = FAMILIES.get(type(module), ComposedPooling)(module).eval()
    with torch.no_grad():
        for name, parameter in adopted.named_parameters():
            if "compose." in name:
                parameter.zero_()
    return adopted


def assert_adopted_equals(module: nn.Module, *args, **kwargs) -> None:
    expected = module(*args, **kwargs)
    torch.testing.assert_close(adopt(module)(*args, **kwargs), expected, rtol=1e-4, atol=1e-5)


def mask(kind: str) -> torch.Tensor | None:
    """Return a mask of the given kind; in boolean masks every query can attend to at least one key."""
    visible = torch.rand(B, 1, T, T, generator=torch.Generator().manual_seed(1)) > 0.4
    visible |= torch.eye(T, dtype=torch.bool)
    return {"none": None, "boolean": visible, "floating": torch.randn(B, H, T, T)}[kind]


NORMS = {"qk_norm": True, "scale_norm": True, "norm_layer": nn.LayerNorm}


@pytest.mark.parametrize("kind", ["none", "boolean", "floating"])
@pytest.mark.parametrize("options", [{}, {"qkv_bias": True, **NORMS}, {"attn_head_dim": 12, "gated": True}], ids=str)
def test_attention_equals_timm_at_zero_compose_weights(options, kind):
    assert_adopted_equals(randomized(Attention(C, H, **options)), torch.randn(B, T, C), attn_mask=mask(kind))


ROTARY = [
    (AttentionRope, {}),
    (AttentionRope, {"qkv_fused": False, "num_kv_heads": 2, "rotate_half": True, **NORMS}),
    (AttentionRope, {"gated": True, "qkv_bias": False}),
    (EvaAttention, {"qkv_fused": False, "rotate_half": True, "qk_norm": True, "norm_layer": nn.LayerNorm}),
    (EvaAttention, {"qkv_fused": True, "scale_norm": True, "norm_layer": nn.LayerNorm}),
]


@pytest.mark.parametrize("kind", ["none", "boolean", "floating", "causal"])
@pytest.mark.parametrize(("cls", "options"), ROTARY, ids=str)
def test_rotary_attention_equals_timm_at_zero_compose_weights(cls, options, kind):
    module = randomized(cls(C, H, num_prefix_tokens=PREFIX, **options))
    rope = torch.randn(T - PREFIX, 2 * D)
    masks = {"is_causal": True} if kind == "causal" else {"attn_mask": mask(kind)}
    assert_adopted_equals(module, torch.randn(B, T, C), rope=rope, **masks)


POOLING = [
    {},
    {"pos_embed": "abs", "feat_size": T, "qk_norm": True},
    {"pool_type": "avg", "latent_len": 3, "norm_layer": nn.LayerNorm},
    {"pool_type": "", "latent_len": 3},
    {"out_features": 0},
    {"q_proj": False, "qkv_bias": False},
    {"latent_dim": 20, "out_features": 24},
]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("options", POOLING, ids=str)
def test_attention_pooling_equals_timm_at_zero_compose_weights(options, masked):
    module = randomized(AttentionPoolLatent(C, num_heads=H, **options))
    attn_mask = mask("boolean")[:, :, :1] if masked else None
    assert_adopted_equals(module, torch.randn(B, T, C), attn_mask=attn_mask)
