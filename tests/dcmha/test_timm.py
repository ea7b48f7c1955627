"""DCAttention as a replacement for timm's `Attention`: arguments, state dict and initialization."""

import math

import pytest
import torch
from torch import nn

from dcmha import DCAttention

timm = pytest.importorskip("timm")
Attention = timm.layers.Attention
PLAIN = DCAttention.with_options(pre_compose=False, post_compose=False)

TIMM_OPTIONS = [
    {},
    {"qkv_bias": True, "qk_norm": True, "norm_layer": nn.LayerNorm},
    {"scale_norm": True, "norm_layer": nn.LayerNorm, "proj_bias": False},
    {"gated": True, "qkv_bias": True, "attn_head_dim": 5, "dim_out": 20},
]


@pytest.mark.parametrize("options", TIMM_OPTIONS, ids=str)
def test_without_compositions_equals_timm_attention(options):
    torch.manual_seed(0)
    theirs = Attention(32, 4, **options).eval()
    ours = PLAIN(32, 4, **options).eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 9, 32)
    mask = torch.rand(9, 9) > 0.4
    mask.fill_diagonal_(True)
    for arguments in ({}, {"is_causal": True}, {"attn_mask": mask}):
        torch.testing.assert_close(ours(x, **arguments), theirs(x, **arguments))


def test_state_dict_adds_only_compose_parameters():
    ours, theirs = (cls(32, 4, gated=True, qk_norm=True, norm_layer=nn.LayerNorm) for cls in (DCAttention, Attention))
    extra = set(ours.state_dict()) - set(theirs.state_dict())
    assert set(theirs.state_dict()) <= set(ours.state_dict())
    assert extra == {"compose.hidden", "compose.project", "compose.gate"}


def test_timm_model_preserves_compose_initialization_and_has_finite_gradients():
    """timm initializes every nn.Linear again. The compose parameters must have the initialization of the paper."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", attn_layer=DCAttention, img_size=32, num_classes=3)
    compose = model.blocks[3].attn.compose
    C, H, R = 192, 3, 2
    expected = {
        "hidden": math.sqrt(2 / (C + 2 * H * R)),
        "project": 0.02 / (math.sqrt(2 * H * R) * (H + R)),
        "gate": 0.05 * math.sqrt(2 / (C + H)),
    }
    for name, std in expected.items():
        assert abs(getattr(compose, name).std() / std - 1) < 0.1, name
    assert abs(model.blocks[3].attn.qkv.weight.std() / 0.02 - 1) < 0.1
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_parameters_on_the_meta_device_can_be_initialized_later():
    model = timm.create_model("vit_tiny_patch16_224", attn_layer=DCAttention, img_size=32, device="meta")
    model.to_empty(device="cpu")
    model.init_weights()
    assert 0 < model.blocks[0].attn.compose.project.std() < 0.01
