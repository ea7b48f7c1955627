"""Published checkpoints: golden outputs, comparison with a plain implementation, file formats and error messages."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import dclm
from dclm.hub.published_weights import weights_from_hub
from tests.dcmha.inputs import relative_error

from .. import published

GOLDEN = Path(__file__).parents[1] / "golden"
MODELS = ("dcformer_lg", "dcformer_mha", "dcpythia_parallel")

COMMON = {"vocab_size": 23, "dim": 24, "n_layer": 5, "n_head": 4, "n_local_heads": 4, "block_size": 32} | {
    "intermediate_size": 36,
    "norm_eps": 1e-5,
    "use_qk_norm": True,
    "window_size": 3,
    "window_type": None,
    "query_wise": False,
    "use_dcmha": True,
    "rope_base": 500,
}
DCFORMER = COMMON | {"model_type": "dcformer", "mgate": False, "mgate_dim": 44}
DCPYTHIA = COMMON | {
    "model_type": "dcpythia",
    "rotary_pct": 0.34,  # int(6 * 0.34) = 2 channels
    "use_parallel_residual": True,
    "use_linear_bias": True,
}
VARIANTS = {
    "dcformer": DCFORMER,
    "mgate": DCFORMER | {"mgate": True, "mgate_dim": 4},
    "lgll": DCFORMER | {"window_type": "LGLL"},
    "lgl6": DCFORMER | {"window_type": "LGL6", "n_layer": 9},
    "lg": DCFORMER | {"window_type": "LG"},
    "global": DCFORMER | {"window_size": None},
    "no_qk_norm": DCFORMER | {"use_qk_norm": False},
    "query_wise": DCFORMER | {"query_wise": True},
    "plain": DCFORMER | {"use_dcmha": False},
    "five_heads": DCFORMER | {"dim": 20, "n_head": 5, "n_local_heads": -1},
    "dcpythia": DCPYTHIA,
    "sequential": DCPYTHIA | {"use_parallel_residual": False},
    "no_bias": DCPYTHIA | {"use_linear_bias": False},
    "pythia_query_wise": DCPYTHIA | {"query_wise": True, "use_qk_norm": False},
}


def write(folder: Path, config: dict, tensors: dict) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def assert_equal_weights(a: dclm.Decoder, b: dclm.Decoder) -> None:
    a, b = a.state_dict(), b.state_dict()
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in b)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_tokens_match_golden_outputs(name):
    decoder, golden = dclm.load_pretrained(GOLDEN / name), load_file(GOLDEN / name / "golden.safetensors")
    with torch.no_grad():
        assert relative_error(decoder(golden["input_ids"]), golden["logits"]) < 2e-5
    prompts = golden["input_ids"][:, : int(golden["prompt_len"])]
    ids = dclm.generate(decoder, prompts, 16)
    assert torch.equal(ids, torch.cat([prompts, golden["greedy_ids"]], 1))


def test_gradients_match_golden_gradients():
    decoder, golden = dclm.load_pretrained(GOLDEN / "dcformer_lg"), load_file(GOLDEN / "dcformer_lg/golden.safetensors")
    grads = load_file(GOLDEN / "dcformer_lg/grads.safetensors")
    loss = decoder(golden["input_ids"][:, :-1], targets=golden["input_ids"][:, 1:])
    assert relative_error(loss, grads.pop("loss").squeeze()) < 2e-5
    loss.backward()
    expected = weights_from_hub({k.removeprefix("grad:"): v for k, v in grads.items()}, decoder.config)
    parameters = dict(decoder.named_parameters())
    assert len(expected) == len(grads) == 27
    for name, grad in expected.items():
        assert relative_error(parameters[name].grad, grad) < 2e-5, name


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_variants_match_plain_implementation(config, tmp_path):
    weights = published.random_weights(config)
    decoder = dclm.load_pretrained(write(tmp_path / "hub", config, weights))
    ids = torch.randint(23, (1, 11), generator=torch.Generator().manual_seed(1))
    expected = published.logits(config, weights, ids[0].tolist())
    with torch.no_grad():
        torch.testing.assert_close(decoder(ids)[0], expected, rtol=1e-10, atol=1e-10)
        cache = decoder.make_cache(11)
        cached = torch.cat([decoder.decode(part, cache) for part in ids.split([4, 1, 1, 3, 1, 1], 1)], 1)
        torch.testing.assert_close(cached[0], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_saved_models_load_with_equal_weights(config, tmp_path):
    weights = published.random_weights(config)
    decoder = dclm.load_pretrained(write(tmp_path / "hub", config, weights))
    again = dclm.load_pretrained(dclm.save_pretrained(decoder, tmp_path / "again"))
    assert_equal_weights(again, decoder)
    assert again.config == decoder.config
    written = load_file(tmp_path / "again/model.safetensors")
    if config["use_dcmha"]:
        A = "layers.1.attention.dyn_w_proj."
        dw1, dd, qkw = written[A + "dw1"], written[A + "dd"], written[A + "qkw"]
        assert torch.equal(written[A + "dw_m"], torch.cat([dw1.reshape(len(dw1), -1), dd[:, 0]], 1))
        assert torch.equal(written[A + "qkw_m"], qkw[0].flatten(2))
        assert written[A + "pre_proj.w"].shape == (1, config["n_head"], config["n_head"])
        if not config["query_wise"]:
            assert torch.equal(dw1, weights[A + "dw1"]) and torch.equal(qkw, weights[A + "qkw"])


def test_window_pattern_is_saved_as_its_period(tmp_path):
    config = dclm.decoder_config("dcformer_pp_debug", vocab_size=9, windows=(8, None, 8, None))
    decoder = dclm.load_pretrained(dclm.save_pretrained(dclm.Decoder(config), tmp_path / "a"))
    assert decoder.config.windows == (8, None)


def test_new_models_are_saved_and_loaded(tmp_path):
    shape = {"vocab_size": 50, "dim": 32, "num_heads": 4, "num_layers": 2, "mlp_dim": 48}
    for name in ("dcformer_pp_debug", "transformer_pp_debug", "dcpythia_debug", "pythia_debug"):
        decoder = dclm.Decoder(dclm.decoder_config(name, **shape)).to(torch.bfloat16)
        again = dclm.load_pretrained(dclm.save_pretrained(decoder, tmp_path / name))
        assert again.output.weight.dtype == torch.bfloat16
        assert_equal_weights(again, decoder)
        assert again.config.layer_windows == decoder.config.layer_windows
        assert dclm.load_pretrained(tmp_path / name, dtype=torch.float32)(torch.arange(9)[None]).dtype == torch.float32


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_groups": 2}, "num_groups=2 is not supported by the published format"),
        ({"rank": 1}, "rank=1 is not supported by the published format"),
        ({"static_base": True}, "static_base=True is not supported by the published format"),
        ({"post_compose": False}, "post_compose=False is not supported by the published format"),
        ({"windows": (4, 8)}, r"windows=\[4, 8\] is not supported by the published format"),
    ],
)
def test_options_outside_published_format_are_rejected(overrides, message, tmp_path):
    decoder = dclm.Decoder(dclm.decoder_config("dcformer_pp_debug", vocab_size=50, **overrides))
    with pytest.raises(ValueError, match=message):
        dclm.save_pretrained(decoder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def lg(tmp_path) -> Path:
    """Return the folder of a modifiable copy of a golden model."""
    shutil.copytree(GOLDEN / "dcformer_lg", tmp_path / "lg")
    return tmp_path / "lg"


def as_bin(folder: Path, zipped: bool = True) -> None:
    tensors = load_file(folder / "model.safetensors")
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    (folder / "model.safetensors").unlink()


def as_shards(folder: Path, suffix: str) -> None:
    name, save = {"safetensors": ("model", save_file), "bin": ("pytorch_model", torch.save)}[suffix]
    tensors = list(load_file(folder / "model.safetensors").items())
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for i in (0, 1):
        shard = f"{name}-0000{i + 1}-of-00002.{suffix}"
        save(dict(tensors[i::2]), folder / shard)
        weight_map |= dict.fromkeys(dict(tensors[i::2]), shard)
    (folder / f"{name}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def without_derived(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if not k.endswith(("_m", "_proj.w"))}, folder / "model.safetensors")


def legacy(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    for key in [k for k in tensors if k.endswith("wqkv.weight")]:
        for letter, part in zip("qkv", tensors.pop(key).chunk(3), strict=True):
            tensors[key.replace("wqkv", f"w{letter}")] = part.clone()
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    "change",
    [
        as_bin,
        lambda f: as_bin(f, zipped=False),
        lambda f: as_shards(f, "safetensors"),
        lambda f: as_shards(f, "bin"),
        without_derived,
        legacy,
    ],
)
def test_alternative_weight_formats_load_equal_weights(change, lg):
    expected = dclm.load_pretrained(lg).state_dict()
    change(lg)
    got = dclm.load_pretrained(lg).state_dict()
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_inconsistent_derived_tensors_cause_warning(lg):
    tensors = load_file(lg / "model.safetensors")
    tensors["layers.1.attention.dyn_w_proj.dw_m"][0, 0] += 1
    save_file(tensors, lg / "model.safetensors")
    with pytest.warns(UserWarning, match="dyn_w_proj.dw_m differ from their originals dw1, qkw and dd"):
        got = dclm.load_pretrained(lg)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_equal_weights(got, dclm.load_pretrained(GOLDEN / "dcformer_lg"))


def test_fused_and_separate_qkv_weights_together_are_rejected(lg):
    tensors = load_file(lg / "model.safetensors")
    for letter in "qkv":
        tensors[f"layers.0.attention.w{letter}.weight"] = torch.zeros(64, 64)
    save_file(tensors, lg / "model.safetensors")
    with pytest.raises(ValueError, match="both layers.0.attention.wqkv.weight and layers.0.attention.wq.weight"):
        dclm.load_pretrained(lg)


def test_mixed_dtypes_are_promoted_to_float32(lg):
    tensors = load_file(lg / "model.safetensors")
    save_file({k: t.half() if "dyn_w" in k else t for k, t in tensors.items()}, lg / "model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decoder = dclm.load_pretrained(lg)
    assert {p.dtype for p in decoder.parameters()} == {torch.float32}
    golden = load_file(lg / "golden.safetensors")
    assert relative_error(decoder(golden["input_ids"]), golden["logits"]) < 0.01


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bert"}, "model_type='bert' is unknown; expected 'dclm', 'dcformer', 'dcpythia'"),
        ({"rope_scaling": {"type": "linear"}}, r"unknown fields \['rope_scaling'\]"),
        ({"use_parallel_residual": True}, r"unknown fields \['use_parallel_residual'\]"),
        ({"n_local_heads": 2}, "n_local_heads=2; expected -1 or n_head=4"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True; expected false"),
        ({"window_type": "GL"}, "window_type='GL' is unknown; expected null, 'LG', 'LGLL', 'LGL6'"),
        ({"window_type": "LG", "window_size": None}, "window_size must be a number with window_type='LG'"),
        ({"n_head": 3, "n_local_heads": 3}, "n_head=3; expected"),
        ({"n_layer": 3}, "unknown layers.3.attention.dyn_w_proj.dd"),
        ({"n_layer": 5}, "missing layers.4.attention.wqkv.weight"),
        ({"vocab_size": 98}, r"tok_embeddings.weight is \[97, 64\], not \[98, 64\]"),
        ({"use_qk_norm": False}, "unknown layers.0.attention.q_norm.scale"),
        ({"query_wise": "false"}, "query_wise='false' must be of type bool"),
        ({"rope_base": None}, "rope_base=None must be of type int or float"),
        ({"n_head": None}, "n_head=None must be of type int"),
        ({"window_size": "256"}, "window_size='256' must be of type int or null"),
        ({"mgate": True, "mgate_dim": 4}, "missing layers.0.feed_forward.mg.weight"),
    ],
)
def test_invalid_config_raises_value_error(changes, message, lg):
    edit_config(lg, **changes)
    with pytest.raises(ValueError, match=message):
        dclm.load_pretrained(lg)


def test_missing_and_unknown_tensors_are_all_listed(lg):
    tensors = load_file(lg / "model.safetensors")
    del tensors["norm.weight"], tensors["layers.2.attention.dyn_w_proj.qkw"]
    tensors["layers.1.adapter.weight"] = torch.zeros(2)
    tensors["lm_bias"], tensors["embed.weight"] = torch.zeros(2), torch.zeros(2)
    tensors["norm.bias"] = torch.zeros(64)
    tensors["output.weight"] = tensors["output.weight"].int()
    save_file(tensors, lg / "model.safetensors")
    with pytest.raises(ValueError) as error:
        dclm.load_pretrained(lg)
    expected = ["missing norm.weight", "missing layers.2.attention.dyn_w_proj.qkw", "unknown layers.1.adapter.weight"]
    expected += [
        "unknown lm_bias",
        "unknown embed.weight",
        "unknown norm.bias",
        "output.weight is torch.int32, not float",
    ]
    for part in expected:
        assert part in str(error.value), part


def test_missing_unsafe_and_malformed_files_raise_error(lg, tmp_path):
    class Payload:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "executed",))

    with pytest.raises(FileNotFoundError, match=r"nothing/config.json does not exist"):
        dclm.load_pretrained(tmp_path / "nothing")
    (lg / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="has no weights; expected model.safetensors, pytorch_model.bin"):
        dclm.load_pretrained(lg)
    torch.save({"norm.weight": Payload()}, lg / "pytorch_model.bin")
    with pytest.raises(ValueError, match="cannot be read as tensors"):
        dclm.load_pretrained(lg)
    assert not (tmp_path / "executed").exists()
    for content, message in (([torch.zeros(2)], "content other"), ({"state_dict": {}}, "content other")):
        torch.save(content, lg / "pytorch_model.bin")
        with pytest.raises(ValueError, match=f"has {message} than named tensors"):
            dclm.load_pretrained(lg)
    (lg / "pytorch_model.bin").unlink()
    (lg / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(FileNotFoundError, match=r"lacks the shards \['model-1.safetensors'\]"):
        dclm.load_pretrained(lg)
    for text, message in (("{}", "has no weight_map"), ("[]", "is not a JSON object"), ("{", "index.json is not JSON")):
        (lg / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            dclm.load_pretrained(lg)
    (lg / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="config.json is not a JSON object"):
        dclm.load_pretrained(lg)


def test_save_pretrained_does_not_overwrite_models(lg):
    before = (lg / "model.safetensors").read_bytes()
    with pytest.raises(FileExistsError, match="contains config.json; nothing was overwritten"):
        dclm.save_pretrained(dclm.load_pretrained(lg), lg)
    assert (lg / "model.safetensors").read_bytes() == before
    decoder = dclm.load_pretrained(lg)
    as_shards(lg, "safetensors")
    (lg / "config.json").unlink()
    with pytest.raises(FileExistsError, match="contains model-00001-of-00002.safetensors; nothing was overwritten"):
        dclm.save_pretrained(decoder, lg)
    assert (lg / "model-00002-of-00002.safetensors").exists()


@pytest.mark.parametrize(
    ("content", "rope_base"),
    [({"model_type": "dcformer"}, 10000), ({"model_type": "dcformer", "mgate": False}, 500000)],
)
def test_config_defaults_follow_version_of_published_code(content, rope_base):
    from dclm.hub.published_config import config_from_hub

    config = config_from_hub(content)
    assert config.rotary_base == rope_base
    assert (config.mlp_dim, config.vocab_size, config.windows) == (6912, 32000, (256, None))
    assert config_from_hub({"model_type": "dcpythia"}).mlp_dim == 4 * 2560
