"""Initialization from weights of plain runs and of Hugging Face models; rejection of incompatible weights."""

import json

import pytest
import torch

import dclm
from dctrain.checkpointing.checkpoint import load_checkpoint, newest_checkpoint
from tests.faults.fault_injection import mistake

from .commands import run, small, spawn
from .hub.test_neox_llama import saved
from .test_decoder import ids
from .test_decoder import small as small_decoder

PLAIN = ["--model.model=transformer_pp_debug", "--model.overrides={num_layers: 2, dim: 32, mlp_dim: 48}"]
COMPOSED = [
    "--model.model=transformer_pp_debug",
    "--model.overrides={num_layers: 2, dim: 32, mlp_dim: 48, windows: [8], pre_compose: true, post_compose: true}",
]
STILL = ["--model.lr=0", "--trainer.max_epochs=1", "--trainer.limit_train_batches=1", "--trainer.limit_val_batches=1"]


def weights(folder) -> dict[str, torch.Tensor]:
    return load_checkpoint(newest_checkpoint(folder))["state_dict"]


@pytest.fixture
def plain(corpus, tmp_path):
    """Return the folder of a short run of a plain model."""
    run("fit", *small(corpus, tmp_path / "plain"), *PLAIN, "--trainer.max_epochs=1")
    return tmp_path / "plain" / "t" / "version_0"


def test_composed_run_starts_from_plain_weights(corpus, plain, tmp_path, capsys):
    run("fit", *small(corpus, tmp_path / "new"), *COMPOSED, *STILL, f"--init={plain}")
    printed = capsys.readouterr().out
    assert f"initial weights from {plain}; 6 tensors are randomly initialized, the first is blocks.0." in printed
    before, now = weights(plain), weights(tmp_path / "new")
    assert all(torch.equal(now[name], weight) for name, weight in before.items())
    new = sorted(now.keys() - before.keys())
    assert len(new) == 6 and all(".attn.compose." in name and now[name].std() > 0 for name in new)
    config = (tmp_path / "new" / "t" / "version_0" / "config.yaml").read_text()
    assert f"init: {plain}" in config


def test_resumed_run_ignores_init(corpus, plain, tmp_path, capsys):
    common = [*small(corpus, tmp_path / "new"), *COMPOSED, f"--init={plain}"]
    run("fit", *common, "--trainer.max_epochs=1")
    (before,) = [weights(tmp_path / "new")]
    capsys.readouterr()
    run("fit", *common, "--model.lr=0", "--trainer.max_epochs=2", f"--resume={tmp_path / 'new' / 't' / 'version_0'}")
    printed = capsys.readouterr().out
    assert "weights from" not in printed and f"init={plain} is not used: the run continues from" in printed
    assert all(torch.equal(weight, before[name]) for name, weight in weights(tmp_path / "new").items())


def test_checkpoint_with_different_num_heads_is_rejected(plain, capsys):
    """The tensors of both models have the same shapes."""
    asked = ["validate", f"--config={plain / 'config.yaml'}", f"--checkpoint={plain}"]
    run(*asked)
    said = mistake(capsys, run, *asked, "--model.overrides.num_heads=2")
    assert "the checkpoint was trained with a different model: num_heads=4, here 2" in said


@pytest.mark.long
def test_sharded_run_starts_from_the_same_weights(corpus, plain, tmp_path):
    two = ["--trainer.strategy=fsdp2", "--trainer.devices=2", "--data.batch_size=2"]
    done = spawn("fit", *small(corpus, tmp_path / "new"), *COMPOSED, *STILL, *two, f"--init={plain}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("weights from") == 1
    now = weights(tmp_path / "new")
    assert all(torch.equal(now[name], weight) for name, weight in weights(plain).items())
    assert all(now[name].std() > 0 for name in now if "compose" in name)


@pytest.mark.parametrize("model_type", ["gpt_neox", "llama"])
def test_composed_run_starts_from_hugging_face_weights(corpus, tmp_path, model_type):
    (tmp_path / "theirs").mkdir()
    decoder = saved(tmp_path / "theirs", model_type)
    name = "pythia_debug" if model_type == "gpt_neox" else "transformer_pp_debug"
    overrides = "{num_layers: 3, dim: 32, num_heads: 4, mlp_dim: 80, pre_compose: true, post_compose: true}"
    model = [f"--model.model={name}", f"--model.overrides={overrides}", f"--init={tmp_path / 'theirs'}"]
    data = ["--data.context_length=24", "--data.batch_size=4", f"--data.tokens={in_61(corpus)}"]
    run("fit", *small(corpus, tmp_path / "new"), *data, "--data.vocab_size=61", *model, *STILL)
    now = weights(tmp_path / "new")
    assert all(torch.equal(now[f"model.{name}"], weight) for name, weight in decoder.state_dict().items())


def in_61(corpus):
    """Reduce the vocabulary of the corpus to 61 tokens, and return its folder."""
    path = corpus / "manifest.json"
    manifest = json.loads(path.read_text()) | {"vocab_size": 61}
    for entry in (entry for entries in manifest["splits"].values() for entry in entries):
        entry["max_token"] = 60
        file = corpus / entry["file"]
        tokens = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint16).to(torch.int64) % 61
        file.write_bytes(tokens.to(torch.uint16).numpy().tobytes())
    path.write_text(json.dumps(manifest))
    return corpus


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"overrides": "norm_eps: 1.0e-6"}, "is a different model: norm_eps=1e-05, here 1e-06"),
        ({"overrides": "rotary_base: 500.0, num_layers: 1"}, "num_layers=2, here 1, rotary_base=10000.0, here 500.0"),
        ({"model": "transformer_debug"}, "norm='rms', here 'layer', mlp='swiglu', here 'gelu'"),
        ({"data": "--data.vocab_size=300"}, "vocab_size=257, here 300 (data.vocab_size, model.model"),
        ({"init": "none"}, "no checkpoint"),
    ],
    ids=str,
)
def test_weights_of_different_model_are_rejected(corpus, plain, tmp_path, capsys, changes, message):
    overrides = "{num_layers: 2, dim: 32, mlp_dim: 48, " + changes.get("overrides", "rank: 2") + "}"
    model = [f"--model.model={changes.get('model', 'transformer_pp_debug')}", f"--model.overrides={overrides}"]
    model += [changes["data"]] if "data" in changes else []
    init = f"--init={changes.get('init', plain)}"
    assert message in mistake(capsys, run, "fit", *small(corpus, tmp_path / "new"), *model, init)
    assert not (tmp_path / "new" / "t").exists()


def test_plain_model_rejects_composed_weights(corpus, tmp_path, capsys):
    run("fit", *small(corpus, tmp_path / "first"), *COMPOSED, *STILL)
    init = f"--init={tmp_path / 'first' / 't' / 'version_0'}"
    error = mistake(capsys, run, "fit", *small(corpus, tmp_path / "new"), *PLAIN, init)
    assert "pre_compose=True, here False, post_compose=True, here False" in error


def test_swap_attention_keeps_logits_close_to_plain_decoder():
    plain = small_decoder("transformer_pp_debug").eval()
    composed = dclm.swap_attention(plain, windows=(None,), impl="reference")
    assert composed.config.pre_compose and composed.config.post_compose and not composed.training
    assert not plain.config.is_composed and composed.output.weight.dtype == torch.float64
    kept = plain.state_dict()
    assert all(torch.equal(composed.state_dict()[name], weight) for name, weight in kept.items())
    assert all(weight is not kept[name] for name, weight in composed.state_dict().items() if name in kept)
    difference = (composed(ids(2, 20)) - plain(ids(2, 20))).norm() / plain(ids(2, 20)).norm()
    assert 0 < difference < 0.2


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("transformer_pp_debug", {"num_layers": 2}, r"unknown options \['num_layers'\]; expected "),
        ("dcformer_pp_debug", {}, "the decoder is already composed"),
        (
            "transformer_pp_debug",
            {"pre_compose": False, "post_compose": False},
            "=False and post_compose=False: expected at least one",
        ),
        ("transformer_pp_debug", {"rank": -1}, "rank=-1"),
    ],
)
def test_invalid_swap_attention_options_raise_value_error(name, options, message):
    with pytest.raises(ValueError, match=message):
        dclm.swap_attention(small_decoder(name), **options)


ADDED = "--model.overrides={windows: [8], qk_norm: true, pre_compose: true, post_compose: true}"


def without_model(arguments: list[str]) -> list[str]:
    return [one for one in arguments if not one.startswith(("--model.model", "--model.overrides"))]


def test_model_configuration_is_read_from_weights(corpus, plain, tmp_path, capsys):
    fit = ["fit", *without_model(small(corpus, tmp_path / "new")), ADDED, *STILL, f"--init={plain}"]
    run("plan", *fit[1:], "--trainer.devices=2")
    assert "2 ranks" in capsys.readouterr().out
    run(*fit)
    out = capsys.readouterr().out
    assert f"model from {plain}" in out and "tensors are randomly initialized" in out
    before, now = weights(plain), weights(tmp_path / "new")
    assert all(torch.equal(now[name], weight) for name, weight in before.items())
    new = now.keys() - before.keys()
    assert {name.split(".")[4] for name in new} == {"compose", "q_norm", "k_norm"}
    config = tmp_path / "new/t/version_0/config.yaml"
    run("validate", f"--config={config}", f"--checkpoint={tmp_path / 'new/t/version_0'}")  # config includes the model
    run("fit", *without_model(small(corpus, tmp_path / "same")), *STILL, f"--init={plain}")
    assert weights(tmp_path / "same").keys() == before.keys()


@pytest.mark.parametrize("model_type", ["gpt_neox", "llama"])
def test_model_configuration_is_read_from_hugging_face_folder(corpus, tmp_path, model_type):
    (tmp_path / "theirs").mkdir()
    decoder = saved(tmp_path / "theirs", model_type)
    data = [f"--data.tokens={in_61(corpus)}", "--data.vocab_size=61"]
    fit = [*without_model(small(corpus, tmp_path / "new")), *data, *STILL, f"--init={tmp_path / 'theirs'}"]
    run("fit", *fit, "--model.overrides={pre_compose: true, post_compose: true}")
    now = weights(tmp_path / "new")
    assert all(torch.equal(now[f"model.{name}"], weight) for name, weight in decoder.state_dict().items())
    assert any("compose" in name for name in now)


@pytest.mark.parametrize("wrong", ["num_layers: 3", "num_heads: 2", "norm: layer", "position: learned"])
def test_settings_that_contradict_the_weights_are_rejected(corpus, plain, tmp_path, capsys, wrong):
    fit = [*without_model(small(corpus, tmp_path / "new")), *STILL, f"--init={plain}"]
    error = mistake(capsys, run, "fit", *fit, f"--model.overrides={{{wrong}}}")
    assert f"model.overrides.{wrong.split(':')[0]}=" in error and "contradicts init=" in error


def test_larger_vocabulary_than_that_of_the_weights_is_rejected(corpus, plain, tmp_path, capsys):
    fit = [*without_model(small(corpus, tmp_path / "new")), *STILL, f"--init={plain}", "--data.vocab_size=300"]
    assert "300 embedding rows" in mistake(capsys, run, "fit", *fit)


def test_run_from_padded_weights_writes_complete_configuration(corpus, tmp_path):
    run("fit", *small(corpus, tmp_path / "padded"), *PLAIN, *STILL, "--data.vocab_size=300")
    init = f"--init={tmp_path / 'padded/t/version_0'}"
    run("fit", *without_model(small(corpus, tmp_path / "new")), *STILL, init)
    made = tmp_path / "new/t/version_0"
    run("validate", f"--config={made / 'config.yaml'}", f"--checkpoint={made}")
    run("fit", f"--config={made / 'config.yaml'}", f"--resume={made}", "--trainer.max_epochs=2")
    assert (made / "config-resumed.yaml").is_file()
