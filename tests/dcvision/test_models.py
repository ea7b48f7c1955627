"""Registered models: parameter counts, pairs of DCMHA model and MHA baseline, and the timm interface."""

import math

import pytest
import timm
import torch

import dcvision
from dcvision.models import sincos_positions

SIZES = [
    *("tiny_patch16_224", "small_patch16_224", "medium_patch16_224", "base_patch16_224"),
    *("small_patch4_32", "digits_patch2_8"),
]


def count(name: str, **kwargs) -> int:
    return sum(p.numel() for p in timm.create_model(name, device="meta", **kwargs).parameters())


def test_parameter_counts_match_paper():
    assert count("mhavit_small_patch16_224") == 21_974_632
    assert count("dcvit_small_patch16_224") == 22_555_240
    assert count("mhavit_medium_patch16_224") == 38_736_360
    heads, layers = 6, 12
    assert count("dcvit_small_patch16_224", static_base=True) == 22_555_240 + layers * 2 * heads**2


@pytest.mark.parametrize("size", SIZES)
def test_dcvit_and_mhavit_differ_only_in_compose_parameters(size):
    keys = [set(timm.create_model(f"{kind}_{size}", device="meta").state_dict()) for kind in ("dcvit", "mhavit")]
    assert keys[1] < keys[0]
    assert all(".attn.compose." in key for key in keys[0] - keys[1])
    assert not any(key.startswith("pos") for key in keys[0])


@pytest.mark.parametrize("name", ["dcvit_tiny_patch16_224", "mhavit_small_patch4_32", "dcvit_digits_patch2_8"])
def test_logits_have_expected_shape_and_gradients_are_nonzero(name):
    model = timm.create_model(name, num_classes=7)
    size = model.pretrained_cfg["input_size"][-1]
    logits = model(torch.randn(2, 3, size, size))
    assert logits.shape == (2, 7)
    torch.nn.init.normal_(model.head.weight)
    model(torch.randn(2, 3, size, size)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_create_model_accepts_compose_options_and_image_size():
    model = timm.create_model("dcvit_tiny_patch16_224", img_size=64, rank=1, key_wise=False, num_groups=3)
    assert model.positions.shape == (1, 16, 192)
    assert model.blocks[0].attn.compose.extra_repr().count("rank=1, ") == 1
    assert model.blocks[0].attn.options.num_groups == 3
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 1000)
    model.set_input_size(img_size=(32, 96))
    assert model(torch.randn(1, 3, 32, 96)).shape == (1, 1000)


def test_dynamic_image_size_matches_model_of_fixed_size():
    torch.manual_seed(0)
    model = timm.create_model("dcvit_digits_patch2_8", dynamic_img_size=True)
    torch.nn.init.normal_(model.head.weight)
    fixed = timm.create_model("dcvit_digits_patch2_8", img_size=12)
    fixed.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 12, 12)
    torch.testing.assert_close(model(x), fixed(x))


def test_features_only_and_reset_classifier_give_expected_shapes():
    features = timm.create_model("dcvit_small_patch4_32", features_only=True, out_indices=(2, 5))
    assert [tuple(f.shape) for f in features(torch.randn(1, 3, 32, 32))] == [(1, 384, 8, 8)] * 2
    model = timm.create_model("dcvit_digits_patch2_8", num_classes=0)
    assert model(torch.randn(1, 3, 8, 8)).shape == (1, 64)
    model.reset_classifier(5)
    assert model(torch.randn(1, 3, 8, 8)).shape == (1, 5)
    assert model.pretrained_cfg["mean"] == (0.5, 0.5, 0.5)


def test_sincos_positions_match_manual_computation():
    got = sincos_positions(2, 3, 8)
    assert got.shape == (1, 6, 8)
    row, column = 1, 2
    low, high = 1.0, 1e-4
    expected = [f(p * w) for p in (column, row) for f in (math.sin, math.cos) for w in (low, high)]
    torch.testing.assert_close(got[0, row * 3 + column], torch.tensor(expected))
    with pytest.raises(ValueError, match="dim=10 must be a multiple of 4"):
        sincos_positions(2, 2, 10)


def test_initial_head_is_zero_and_weights_have_expected_std():
    torch.manual_seed(0)
    model = timm.create_model("dcvit_small_patch4_32")
    assert model.head.weight.abs().max() == 0
    attn = model.blocks[5].attn
    for part in attn.qkv.weight.chunk(3):
        assert abs(part.std() / math.sqrt(2 / (384 + 384)) - 1) < 0.05
    assert abs(attn.compose.gate.std() / (0.05 * math.sqrt(2 / 390)) - 1) < 0.1


def test_exported_names_exist():
    assert set(dcvision.__all__) <= set(dir(dcvision))
