"""Composed attention in existing timm models: the learned weights do not change."""

import copy
import re
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from timm.layers import LayerScale
from timm.models import VisionTransformer, save_for_hf
from torch import nn

from dcmha import DCAttention, DCCrossAttention
from dcvision import swap_attention
from dcvision.factory import build_model

MODELS = {  # at least one per family, with variants of norms, biases, rotary embeddings and prefix tokens
    "vit_tiny_patch16_224": {"img_size": 32, "depth": 2},
    "deit3_small_patch16_224": {"img_size": 32, "depth": 2},
    "beit3_base_patch16_224": {"img_size": 32, "depth": 1},
    "vit_base_patch16_clip_224": {"img_size": 32, "depth": 1},
    "vit_base_patch16_siglip_224": {"img_size": 32, "depth": 1},
    "vit_small_patch14_dinov2": {"img_size": 28, "depth": 2},
    "eva_giant_patch14_224": {"img_size": 28, "depth": 1},
    "eva02_tiny_patch14_224": {"img_size": 28, "depth": 2},
    "vit_small_patch16_dinov3": {"img_size": 64, "depth": 2},
    "vit_pe_core_tiny_patch16_384": {"img_size": 64, "depth": 2},
    "beit_base_patch16_224": {"img_size": 32, "depth": 1},
    "swin_tiny_patch4_window7_224": {"img_size": 112},
    "naflexvit_base_patch16_gap": {"depth": 1},
    "naflexvit_base_patch16_siglip": {"depth": 1},
    "swinv2_tiny_window8_256": {
        "img_size": 64,
        "window_size": 4,
        "depths": (2, 2),
        "embed_dim": 24,
        "num_heads": (2, 4),
    },
    "swinv2_cr_tiny_ns_224": {"img_size": 64, "window_size": 2, "depths": (2, 2), "embed_dim": 24, "num_heads": (2, 4)},
    "samvit_base_patch16_224": {"img_size": 64, "depth": 2, "window_size": 3, "embed_dim": 96},
    "vit_relpos_small_patch16_224": {"img_size": 64, "depth": 2},
    "vit_srelpos_small_patch16_224": {"img_size": 64, "depth": 2},
    "cait_xxs24_224": {"img_size": 64, "depth": 2},
    "pvt_v2_b0": {},
    "twins_svt_small": {"img_size": 64, "depths": (1, 1, 2, 2)},
    "nextvit_small": {},
    "mvitv2_tiny": {"img_size": 64},
    "hiera_tiny_224": {"img_size": 224, "stages": (1, 1, 1, 1)},
    "sam2_hiera_tiny": {"stages": (1, 1, 2, 1)},
    "maxvit_pico_rw_256": {"img_size": 64},
    "coatnet_nano_rw_224": {"img_size": 64},
    "caformer_s18": {},
    "nest_tiny_jx": {"img_size": 112},
    "fastvit_sa12": {},
    "visformer_tiny": {"img_size": 64},
    "tnt_s_patch16_224": {"img_size": 32, "depth": 2},
    "crossvit_tiny_240": {},
    "gcvit_xxtiny": {"img_size": 64},
    "gemma4_vit_167m": {"depth": 1},
    "tiny_vit_5m_224": {},
    "levit_128s": {"img_size": 64},
    "levit_conv_128s": {"img_size": 64},
    "efficientformer_l1": {},
    "efficientformerv2_s0": {"img_size": 64},
    "mobilenetv4_hybrid_medium": {},
}
SIZES = {"sam2_hiera_tiny": 224, "crossvit_tiny_240": 240, "tiny_vit_5m_224": 224, "efficientformer_l1": 224}
NEAR = {"visformer_tiny": 0.3}  # its untrained convolutions amplify small changes from layer to layer
NOISE = {"mobilenetv4_hybrid_medium": 0.1}  # deep model whose activations grow with more noise
LARGE = (
    *("caformer_s18", "nest_tiny_jx", "crossvit_tiny_240", "tiny_vit_5m_224", "efficientformer_l1", "gemma4_vit_167m"),
    *("nextvit_small", "mvitv2_tiny", "eva_giant_patch14_224"),
)


def make_model(name: str, **kwargs) -> nn.Module:
    """Return a small model with random weights, none of which has a value that hides the attention."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5, **MODELS[name], **kwargs).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, LayerScale):
                module.gamma.fill_(1.0)
        for parameter_name, parameter in model.named_parameters():
            if not parameter.any() and parameter_name.endswith("weight"):
                parameter.fill_(1.0)
            if re.search("gamma_|bias|relative", parameter_name):
                parameter.add_(NOISE.get(name, 0.5) * torch.randn_like(parameter))
    return normalized(model) if name == "visformer_tiny" else model


def normalized(model: nn.Module) -> nn.Module:
    """Set the batch norm statistics from random images; otherwise the activations of an untrained model grow."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        model.train()(torch.randn(16, 3, 64, 64))
    return model.eval()


def images(name: str) -> torch.Tensor:
    size = SIZES.get(name) or MODELS[name].get("img_size", 64)
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))


def zero_compose(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".compose." in name:
                parameter.zero_()
    return model


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LARGE)) for name in MODELS])
def test_swapped_model_equals_original_at_zero_compose_weights(name, tmp_path):
    """The initial output is close to the original, all gradients are finite, and the model can be saved and loaded."""
    model, x = make_model(name), images(name)
    keys = set(model.state_dict())
    expected = model(x).detach()
    assert swap_attention(model) is model
    started = model(x)
    assert (started - expected).norm() < NEAR.get(name, 0.15) * expected.norm()
    started.square().sum().backward()
    compose = [p for n, p in model.named_parameters() if ".compose." in n]
    assert len(compose) >= 3 and all(p.grad.isfinite().all() and p.grad.any() for p in compose)
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    added = set(model.state_dict()) - keys
    assert keys <= set(model.state_dict()) and all(".compose." in key for key in added)
    again = swap_attention(timm.create_model(name, num_classes=5, **MODELS[name]).eval())
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again(x), started)
    save_for_hf(model, str(tmp_path), safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    torch.testing.assert_close(again(x), started)
    zero_compose(model)
    assert (model(x) - expected).norm() < 3e-6 * expected.norm()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("cait_xxs24_224", marks=pytest.mark.slow),
        pytest.param("hiera_tiny_224", marks=pytest.mark.long),
    ],
)
def test_swapped_model_can_be_copied_and_pickled(name, tmp_path):
    """The pickle is loaded in a process that did not call `swap_attention`."""
    model, x = swap_attention(make_model(name)), images(name)
    expected = model(x).detach()
    torch.testing.assert_close(copy.deepcopy(model)(x), expected)
    torch.save((model, x, expected), tmp_path / "model.pt")
    script = "import sys, torch; model, x, y = torch.load(sys.argv[1], weights_only=False)"
    script += "; torch.testing.assert_close(model(x), y)"
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "model.pt"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_swap_applies_options_to_selected_layers():
    model = make_model("vit_tiny_patch16_224")
    swap_attention(model, layers=[-1], rank=1, post_compose=False, impl="reference")
    first, last = (block.attn for block in model.blocks)
    assert not isinstance(first, DCAttention) and isinstance(last, DCAttention)
    assert last.compose.project.shape == (2, 6, 6) and last.impl == "reference"
    swap_attention(model, layers=0, rank=None)
    assert isinstance(model.blocks[0].attn, DCAttention) and model.blocks[0].attn.options.rank == 2


def test_swapped_model_supports_compile_intermediates_checkpointing_and_features():
    name = "eva02_tiny_patch14_224"
    model, x = swap_attention(make_model(name)), images(name)
    expected = model(x)
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), expected)
    final, intermediates = model.forward_intermediates(x)
    assert len(intermediates) == 2 and model.forward_head(final).shape == (2, 5)
    model.set_grad_checkpointing()
    model.train()(x).sum().backward()
    assert model.blocks[0].attn.compose.project.grad.any()
    features = swap_attention(timm.create_model(name, features_only=True, out_indices=[1], **MODELS[name]).eval())
    assert [tuple(feature.shape) for feature in features(x)] == [(2, 192, 2, 2)]


@pytest.mark.parametrize("name", ["vit_base_patch16_siglip_224", "naflexvit_base_patch16_siglip"])
def test_swapped_attention_pooling_equals_original_at_zero_compose_weights(name):
    model, x = make_model(name), images(name)
    expected = model(x)
    swap_attention(model, num_groups=3)
    swap_attention(model, pooling=True, num_groups=3)
    assert isinstance(model.attn_pool, DCCrossAttention)
    started = model(x)
    assert 0 < (started - expected).norm() < 0.15 * expected.norm()
    started.square().sum().backward()
    assert all(p.grad.any() for n, p in model.named_parameters() if n.startswith("attn_pool.compose."))
    zero_compose(model)
    assert (model(x) - expected).norm() < 3e-6 * expected.norm()


def test_swapped_model_is_created_and_loaded_by_timm(tmp_path):
    """The model `dcmha_swapped` accepts the options of several calls, and a saved model contains them."""
    calls = [{"layers": [0], "rank": 1}, {"pooling": True, "num_groups": 3, "post_compose": False}]
    name = "vit_base_patch16_siglip_224"
    made = timm.create_model("dcmha_swapped", base=name, swaps=calls, num_classes=5, img_size=32, depth=2)
    model = timm.create_model(name, num_classes=5, img_size=32, depth=2)
    for options in calls:
        swap_attention(model, **options)
    assert {k: v.shape for k, v in made.state_dict().items()} == {k: v.shape for k, v in model.state_dict().items()}
    for number, each in enumerate((made, model)):
        save_for_hf(each, str(tmp_path / str(number)), safe_serialization=True)
        loaded = timm.create_model(f"local-dir:{tmp_path / str(number)}", pretrained=True)
        torch.testing.assert_close(loaded.eval()(images(name)), each.eval()(images(name)))
        assert loaded.blocks[0].attn.options.rank == 1 and not loaded.blocks[1].attn.options.post_compose
    by_hand = swap_attention(VisionTransformer(img_size=32, depth=1))
    assert isinstance(by_hand.blocks[0].attn, DCAttention)


def test_former_option_name_window_is_accepted():
    """Older runs and saved models contain `window`, the former name of `window_size`."""
    kwargs = {"num_classes": 5, "img_size": 32, "depth": 2}
    by_timm = timm.create_model("dcmha_swapped", base="vit_tiny_patch16_224", swaps=[{"window": 3}], **kwargs)
    by_size = timm.create_model("dcvit_tiny_patch16_224", window=3, **kwargs)
    by_run = build_model("vit_tiny_patch16_224", 5, 32, {"depth": 2}, {"window": 3})
    assert [block.attn.window for model in (by_timm, by_size, by_run) for block in model.blocks] == [3] * 6


@pytest.mark.parametrize(
    ("name", "saved", "loaded"),
    [
        ("vit_tiny_patch16_224", {"img_size": 32}, {"img_size": 64}),
        ("vit_tiny_patch16_224", {"img_size": 32}, {"patch_size": 8}),
        ("eva02_tiny_patch14_224", {"img_size": 28}, {"img_size": 56}),
        ("beit_base_patch16_224", {"img_size": 32}, {"img_size": 64}),
        ("swin_tiny_patch4_window7_224", {"img_size": 56}, {"img_size": 64, "window_size": 4}),
        ("flexivit_small", {"img_size": 64}, {"patch_size": 8}),
    ],
)
def test_swapped_model_loads_at_different_size_like_original(name, saved, loaded, tmp_path):
    small = {} if name.startswith("swin") else {"depth": 1}
    plain = timm.create_model(name, num_classes=5, **saved, **small)
    save_for_hf(plain, str(tmp_path / "plain"), safe_serialization=True)
    zero_compose(swap_attention(plain))
    save_for_hf(plain, str(tmp_path / "swapped"), safe_serialization=True)
    size = loaded.get("img_size", saved["img_size"])
    outputs = []
    for folder in ("plain", "swapped"):
        model = timm.create_model(f"local-dir:{tmp_path / folder}", pretrained=True, **loaded).eval()
        outputs.append(model(torch.ones(1, 3, size, size)))
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


def test_swapped_model_loads_with_different_pooling_and_features_only(tmp_path):
    name = "vit_base_patch16_siglip_224"
    model = make_model(name)
    swap_attention(swap_attention(model), layers=[], pooling=True)
    model.reset_classifier(3, "avg")
    save_for_hf(model, str(tmp_path / "averaged"), safe_serialization=True)
    loaded = timm.create_model(f"local-dir:{tmp_path / 'averaged'}", pretrained=True).eval()
    torch.testing.assert_close(loaded(images(name)), model(images(name)))
    for folder in ("plain", "swapped"):  # timm initializes the new norm
        model = make_model(name) if folder == "plain" else zero_compose(swap_attention(make_model(name)))
        save_for_hf(model, str(tmp_path / folder), safe_serialization=True)
    loaded = [
        timm.create_model(f"local-dir:{tmp_path / folder}", pretrained=True, global_pool="avg").eval()
        for folder in ("plain", "swapped")
    ]
    torch.testing.assert_close(loaded[1](images(name)), loaded[0](images(name)), rtol=1e-4, atol=1e-5)
    for name, shape in (("vit_tiny_patch16_224", (192, 2, 2)), ("swin_tiny_patch4_window7_224", (192, 14, 14))):
        save_for_hf(swap_attention(make_model(name)), str(tmp_path / name), safe_serialization=True)
        options = {"pretrained": True, "features_only": True, "out_indices": [1]}
        features = timm.create_model(f"local-dir:{tmp_path / name}", **options)
        assert [tuple(feature.shape[1:]) for feature in features(images(name))] == [shape]


def test_swap_preserves_dropout_and_training_mode():
    model = make_model("vit_tiny_patch16_224", attn_drop_rate=0.5, proj_drop_rate=0.25).train()
    swap_attention(model)
    attention = model.blocks[0].attn
    assert attention.training and attention.attn_drop.p == 0.5 and attention.proj_drop.p == 0.25
    x = images("vit_tiny_patch16_224")
    assert not torch.equal(model(x), model(x))


def test_swapped_swin_matches_original_after_image_size_change():
    model = make_model("swin_tiny_patch4_window7_224")
    plain = make_model("swin_tiny_patch4_window7_224")
    swap_attention(model)
    zero_compose(model)
    for m in (model, plain):
        m.set_input_size((64, 64), window_size=(4, 4))
    x = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)


def test_swapped_base_must_be_known_to_timm_and_may_include_tag():
    with pytest.raises(ValueError, match="base='local-dir:x' is unknown to timm"):
        timm.create_model("dcmha_swapped", base="local-dir:x")
    model = timm.create_model("dcmha_swapped", base="vit_tiny_patch16_224.augreg_in21k", depth=1)
    assert model.head.out_features == 21843  # number of classes of the tag


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: timm.create_model("resnet18"), {}, "ResNet has no self-attention to swap"),
        (lambda: timm.create_model("dcvit_digits_patch2_8"), {}, "its layers are DCAttention"),
        (lambda: timm.create_model("lowformer_b0"), {}, "LowFormer has ConvAttention; expected a supported"),
        (lambda: timm.create_model("xcit_nano_12_p16_224"), {}, "XCA is channel attention"),
        (lambda: timm.create_model("convit_tiny"), {}, "GPSA is gated positional attention"),
        (lambda: timm.create_model("mobilevitv2_050"), {}, "LinearSelfAttention is linear attention"),
        (
            lambda: make_model("pvt_v2_b0"),
            {"window_size": 3},
            "window_size=3: Attention has its own windows, or none",
        ),
        (
            lambda: make_model("cait_xxs24_224"),
            {"num_groups": 2},
            "num_groups=2: TalkingHeadAttn mixes all heads",
        ),
        (lambda: make_model("vit_tiny_patch16_224"), {"layers": [0, 2]}, r"layers=\[0, 2\]; expected indices 0 to 1"),
        (lambda: make_model("vit_tiny_patch16_224"), {"layers": []}, r"layers=\[\]: nothing to swap"),
        (lambda: make_model("vit_tiny_patch16_224"), {"layers": [1.0]}, "layers=.*; expected"),
        (
            lambda: swap_attention(make_model("vit_tiny_patch16_224")),
            {},
            "nothing to swap in VisionTransformer; expected indices 0 to 1",
        ),
        (lambda: swap_attention(make_model("vit_tiny_patch16_224")), {"layers": [1]}, r"not swapped yet; \[1\] are"),
        (lambda: make_model("vit_tiny_patch16_224"), {"rank": "2"}, "blocks.0.attn: rank='2' must be an integer"),
        (
            lambda: make_model("vit_tiny_patch16_224"),
            {"num_groups": 2},
            "blocks.0.attn: num_groups=2 must be .* divisor",
        ),
        (lambda: make_model("vit_tiny_patch16_224"), {"heads": 2}, r"unknown options \['heads'\]; expected rank"),
        (lambda: make_model("vit_tiny_patch16_224"), {"impl": "flash"}, "impl='flash' is unknown"),
        (lambda: make_model("vit_tiny_patch16_224"), {"pooling": True}, "VisionTransformer has no attention pooling"),
        (lambda: make_model("swin_tiny_patch4_window7_224"), {"num_groups": 6}, "layers.0.blocks.0.attn: num_groups=6"),
        (
            lambda: make_model("vit_tiny_patch16_224"),
            {"pre_compose": False, "post_compose": False},
            "post_compose=False: expected at least one of them",
        ),
    ],
)
def test_invalid_swap_raises_error_and_leaves_model_unchanged(make, options, message):
    model = make()
    before = dict(model.named_modules())
    with pytest.raises(ValueError, match=message):
        swap_attention(model, **options)
    after = dict(model.named_modules())
    assert before.keys() == after.keys() and all(before[name] is after[name] for name in before)


@pytest.mark.long
def test_support_table_in_readme_matches_swap_attention():
    """The table describes the installed timm; `python -m dcvision.families.support_table` prints it."""
    from dcvision.families.support_table import survey, table

    readme = (Path(__file__).parents[2] / "dcvision/families/README.md").read_text()
    assert readme.endswith(table(survey()))
