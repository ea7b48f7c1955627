"""Checks of timm's own test suite on the registered models, at a small size and at the default size."""

import io

import pytest
import timm
import torch
from timm.models._features_fx import create_feature_extractor

import dcvision  # noqa: F401
from dctrain.activation_checkpointing import set_recompute

FIRST = ["dcvit_digits_patch2_8", "mhavit_tiny_patch16_224"]
NAMES = [
    pytest.param(name, marks=[pytest.mark.slow] * (name not in FIRST))
    for name in sorted(timm.list_models(["dcvit_*", "mhavit_*"]))
]
SMALL = {"img_size": 32, "depth": 2}
EXPORTED = ["dcvit_tiny_patch16_224", "mhavit_tiny_patch16_224"]


def make(name: str, **kwargs) -> torch.nn.Module:
    """Return a shallow model for small images with a nonzero head."""
    torch.manual_seed(0)
    model = timm.create_model(name, **{**SMALL, **kwargs})
    if isinstance(getattr(model, "head", None), torch.nn.Linear):
        torch.nn.init.normal_(model.head.weight)
    return model.eval()


def images(batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 3, 32, 32)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_default_size_model_has_finite_logits_of_expected_shape(name):
    model = timm.create_model(name)
    cfg = model.default_cfg
    logits = model(torch.randn(1, *cfg["input_size"]))
    assert logits.shape == (1, cfg["num_classes"]) and logits.isfinite().all()
    assert {f"{cfg[part]}.weight" for part in ("classifier", "first_conv")} <= model.state_dict().keys()


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_has_finite_gradient(name):
    model = make(name, num_classes=42).train()
    model(images()).mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_reset_classifier_and_global_pool_give_expected_shapes(name):
    model = make(name)
    features = model.forward_features(images())
    assert features.shape == (2, model.patch_embed.num_patches, model.num_features)
    assert model.forward_head(features, pre_logits=True).shape == (2, model.num_features)
    model.reset_classifier(0)
    assert model(images()).shape == (2, model.num_features)
    model.reset_classifier(0, "")
    assert model(images()).shape == features.shape
    assert make(name, num_classes=0, global_pool="").forward_head(features).shape == features.shape
    for pool in ("avg", "max", "avgmax", "map"):
        assert make(name, global_pool=pool)(images()).shape == (2, model.default_cfg["num_classes"]), pool
    with pytest.raises(AssertionError, match="needs the class token"):
        make(name, global_pool="token")


@pytest.mark.parametrize("name", NAMES)
def test_intermediate_features_have_expected_shapes(name):
    model = make(name, features_only=True, depth=4)
    maps = model(images())
    assert [x.shape[1] for x in maps] == model.feature_info.channels()
    assert [32 // x.shape[-1] for x in maps] == model.feature_info.reduction()
    model = make(name, reg_tokens=3)
    last, (first, second) = model.forward_intermediates(images(), norm=True)
    assert torch.equal(second.flatten(2).mT, last[:, 3:]) and first.shape == second.shape
    kept = model.forward_intermediates(images(), indices=[0], intermediates_only=True, return_prefix_tokens=True)
    assert kept[0][1].shape == (2, 3, model.num_features)
    model.prune_intermediate_layers([0])
    assert len(model.blocks) == 1


@pytest.mark.parametrize("name", NAMES)
def test_fx_feature_extractor_matches_model(name):
    model, x = make(name), images()
    traced = create_feature_extractor(model, {"blocks.1": "block", "head": "logits"})
    outputs = traced(x)
    assert torch.equal(outputs["logits"], model(x)) and outputs["block"].dim() == 3
    outputs["logits"].mean().backward()
    assert all(p.grad is not None for p in traced.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_activation_recomputation_preserves_gradients(name):
    model, x = make(name).train(), images()
    gradients = []
    for choice in ("none", "attention", "block"):
        set_recompute(model, choice)
        model.zero_grad()
        model(x).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for whole, *others in zip(*gradients, strict=True):
        for recomputed in others:
            torch.testing.assert_close(whole, recomputed)


@pytest.mark.parametrize("name", NAMES)
def test_model_is_created_with_dtype_and_from_meta_device(name):
    model = make(name, device="cpu", dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model(images().bfloat16()).dtype == torch.bfloat16
    empty = timm.create_model(name, device="meta", **SMALL).to_empty(device="cpu")
    empty.init_weights()
    assert torch.equal(empty.positions, make(name).positions) and empty(images()).isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_group_matcher_covers_all_parameters(name):
    model = make(name)
    assert model.no_weight_decay() <= {"pos_embed", "cls_token", "reg_token", "dist_token"}
    grouped = timm.models.group_parameters(model, model.group_matcher())
    assert sum(map(len, grouped.values())) == sum(1 for _ in model.named_parameters())


@pytest.mark.parametrize("name", ["dcvit_tiny_patch16_224", "mhavit_tiny_patch16_224"])
@pytest.mark.parametrize("registers", [1, 4])
def test_registers_precede_patches_and_are_excluded_from_pooling(name, registers):
    model, x = make(name, reg_tokens=registers, num_classes=5), images()
    features = model.forward_features(x)
    assert features.shape[1] == registers + model.patch_embed.num_patches
    torch.testing.assert_close(model(x), model.head(features[:, registers:].mean(1)))
    before = model(x)
    torch.nn.init.normal_(model.reg_token)
    assert not torch.allclose(model(x), before)
    twin = make(name, num_classes=5)
    twin.load_state_dict({key: value for key, value in model.state_dict().items() if key != "reg_token"})
    patches = twin.patch_embed(x) + twin.positions
    tokens = torch.cat([model.reg_token.expand(2, -1, -1), patches], 1)
    torch.testing.assert_close(model.forward_features(x), twin.norm(twin.blocks(tokens)))


@pytest.mark.parametrize("name", ["dcvit_tiny_patch16_224", "mhavit_tiny_patch16_224"])
@pytest.mark.parametrize(
    ("argument", "value"),
    [("class_token", True), ("pos_embed", "learn"), ("fc_norm", True), ("final_norm", False), ("qkv_bias", False)],
)
def test_arguments_that_change_fixed_architecture_are_rejected(name, argument, value):
    with pytest.raises(ValueError, match=f"{argument}={value!r}: dcvit_.* and mhavit_.* models have {argument}="):
        make(name, **{argument: value})


@pytest.mark.parametrize("name", EXPORTED)
def test_exported_program_matches_model(name):
    model, x = make(name), images()
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},))
    for size in (1, 2, 5):
        torch.testing.assert_close(program.module()(images(size).fill_(0.3)), model(images(size).fill_(0.3)))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTED)
def test_onnx_model_matches_model(name, tmp_path):
    import onnxruntime

    model, x = make(name), images()
    torch.onnx.export(model, (x,), dynamo=True, verbose=False).save(str(tmp_path / "model.onnx"))
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    (logits,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), model(x).detach(), rtol=1e-4, atol=1e-4)


TORCHSCRIPT = {
    "torch.jit.script": lambda model, x: torch.jit.script(model),
    "torch.jit.trace": lambda model, x: torch.jit.trace(model, x),
    "the TorchScript-based ONNX exporter": lambda model, x: torch.onnx.export(model, (x,), io.BytesIO(), dynamo=False),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", TORCHSCRIPT)
def test_torchscript_raises_error_that_suggests_torch_export(way):
    with pytest.raises(NotImplementedError, match=rf"{way}.* cannot take composed attention; use torch\.export"):
        TORCHSCRIPT[way](make("dcvit_tiny_patch16_224"), images())
