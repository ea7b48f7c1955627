"""Command line of dclm: training runs, validation, generation, export, strategies and error messages."""

import math
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import dclm
from dclm.bigram import ByteBigram
from dclm.data.token_files import Corpus
from dctrain.checkpointing.checkpoint import load_checkpoint, newest_checkpoint
from dctrain.evaluation.items import read_items
from tests.dctrain.commands import ROOT, record
from tests.dctrain.recorder import read

from .commands import run, small, spawn
from .data.corpora import prepared

TEXT = "def main(args):\n    return [arg for arg in args]\n"
FSDP = ["--trainer.strategy=fsdp2"]


def scalars(folder: Path) -> dict[str, list]:
    log = EventAccumulator(str(folder)).Reload()
    return {tag: log.Scalars(tag) for tag in log.Tags()["scalars"]}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the folder that contains a short run on repetitive text and its corpus."""
    root = tmp_path_factory.mktemp("trained")
    for i in range(40):
        (root / f"{i:02d}.txt").write_text(TEXT * (1 + i % 3) + f"# {i}\n")
    prepared([root], root / "corpus", val_fraction=0.2)
    run(
        *("fit", "--config", str(ROOT / "configs/lm/stdlib.yaml"), "--name=t", f"--data.tokens={root / 'corpus'}"),
        *("--trainer.accelerator=cpu", f"--trainer.default_root_dir={root}", "--trainer.enable_progress_bar=false"),
        *("--trainer.max_steps=60", "--trainer.val_check_interval=20", "--trainer.log_every_n_steps=5"),
        *("--data.context_length=32", "--data.batch_size=4", "--trainer.callbacks.prompt=def "),
        *("--model.overrides={num_layers: 2, dim: 64, mlp_dim: 96}", "--model.lr=0.003"),
    )
    return root


def test_fit_reduces_loss_and_logs_metrics(trained):
    log = scalars(trained / "t/version_0")
    losses = [event.value for event in log["val/loss"]]
    assert len(losses) == 3 and losses[-1] < 1.5 < losses[0]
    val = Corpus(trained / "corpus").split("val")
    count = (len(val) - 1) // 32 * 32
    ratio = (val[1 : count + 1] < 256).sum() / count
    for loss, perplexity, bits in zip(*(log[f"val/{n}"] for n in ("loss", "perplexity", "bits_per_byte")), strict=True):
        assert perplexity.value == pytest.approx(math.exp(loss.value), rel=1e-5)
        assert bits.value == pytest.approx(loss.value / math.log(2) / ratio, rel=1e-5)
    for tag in ("train/loss", "train/lr", "train/grad_norm", "train/tokens_per_second", "train/mfu"):
        assert len(log[tag]) == 12, tag
    assert all(0 < event.value < 1.5 for event in log["train/mfu"])
    lr = [event.value for event in log["train/lr"]]
    assert lr[-1] == pytest.approx(0.003 * 0.1, rel=0.1) and max(lr) == pytest.approx(0.003, rel=0.05)


def test_bigram_baseline_and_text_sample_are_printed(corpus, tmp_path, capsys):
    callbacks = ["--trainer.callbacks+=dclm.callbacks.BigramBaseline", "--trainer.callbacks+=dclm.callbacks.TextSample"]
    often = ["--trainer.max_epochs=1", "--trainer.val_check_interval=4"]  # ten steps, not a multiple of 4
    run("fit", *small(corpus, tmp_path), *callbacks, "--trainer.callbacks.prompt=ab", *often)
    out = capsys.readouterr().out
    logged = scalars(tmp_path / "t/version_0")["val/bits_per_byte"]
    assert logged[-1].step == 10 and f"\nbits per byte: {logged[-1].value:.3f}, " in out
    loss = read_items(tmp_path / "t/version_0")["val/loss"]
    assert len(loss.values) == 7
    mean = sum(value * loss.weights[name] for name, value in loss.values.items()) / sum(loss.weights.values())
    assert mean == pytest.approx(scalars(tmp_path / "t/version_0")["val/loss"][-1].value, rel=1e-5)
    tokens = [Corpus(corpus).split("train")[:], Corpus(corpus).split("val")[1 : 7 * 24 + 1]]
    train, val = (bytes(row[row < 256].astype("uint8")).decode(errors="replace").encode() for row in tokens)
    bits = ByteBigram(train).bits_per_byte(val)
    assert f"byte-bigram baseline: {bits:.3f} bits per byte on the validation text" in out
    assert f", byte-bigram baseline {bits:.3f}" in out
    assert "sample after 10 steps:\nab" in out
    assert "best val/loss" in out and "tensorboard --logdir" in out


def test_bigram_bits_per_byte_matches_hand_calculation():
    text = b"abababac"
    # "a" precedes "b" three times and "c" once, "b" precedes "a" three times; 0.1 is added to each of 256 counts
    p_ab, p_ac, p_ba = 3.1 / 29.6, 1.1 / 29.6, 3.1 / 28.6
    expected = -(3 * math.log2(p_ab) + math.log2(p_ac) + 3 * math.log2(p_ba)) / 7
    assert ByteBigram(text).bits_per_byte(text) == pytest.approx(expected)


def test_validate_reproduces_best_loss_of_training(trained, capsys):
    config = trained / "t/version_0/config.yaml"
    checkpoint = next((trained / "t/version_0/checkpoints").glob("best*"))
    run("validate", f"--config={config}", f"--checkpoint={checkpoint}")
    reported = min(event.value for event in scalars(trained / "t/version_0")["val/loss"])
    assert f"{reported:.4f}"[:5] in capsys.readouterr().out
    assert f"loss={reported:.4f}" in checkpoint.name


def test_generate_continues_text(trained, capsys):
    checkpoint = trained / "t/version_0"
    shutil.move(trained / "corpus", trained / "moved")  # the checkpoint contains the tokenizer
    run("generate", f"--checkpoint={checkpoint}", "--prompt=def main", "--temperature=0", "--max_new_tokens=30")
    shutil.move(trained / "moved", trained / "corpus")
    first = capsys.readouterr().out
    assert first.startswith("def main(args):\n    return [")
    options = ["--temperature=0", "--max_new_tokens=20"]
    run("generate", f"--checkpoint={checkpoint}", "--prompt", "def main", "ret", *options)
    rows = capsys.readouterr().out.split("\n" + "-" * 20 + "\n")
    assert rows[0] == first[: len("def main") + 20]
    assert rows[1].startswith("ret") and len(rows) == 3
    for text in ("[a, b]", "null", "a: b", "3.0", "'", "{"):
        run("generate", f"--checkpoint={checkpoint}", f"--prompt={text}", *options)
        assert capsys.readouterr().out.startswith(text)
    for seed in (3, 3):
        run("generate", f"--checkpoint={checkpoint}", "--prompt=x", "--temperature=2", f"--seed={seed}")
    a, b = capsys.readouterr().out, capsys.readouterr().out
    assert a[: len(a) // 2] == a[len(a) // 2 :] and b == ""


def test_exported_model_generates_same_text(trained, capsys, tmp_path):
    run("export", f"--checkpoint={trained / 't/version_0'}", f"--out={tmp_path / 'hub'}")
    assert "load with dclm.load_pretrained" in capsys.readouterr().out
    options = ["--prompt=def main", "--temperature=0", "--max_new_tokens=30"]
    run("generate", f"--checkpoint={tmp_path / 'hub'}", "--tokenizer=bytes", *options)
    published = capsys.readouterr().out
    run("generate", f"--checkpoint={newest_checkpoint(trained)}", *options)
    assert capsys.readouterr().out == published
    assert "no tokenizer" in mistake(capsys, "generate", f"--checkpoint={tmp_path / 'hub'}", *options)
    again = mistake(capsys, "export", f"--checkpoint={trained / 't/version_0'}", f"--out={tmp_path / 'hub'}")
    assert "contains config.json; nothing was overwritten" in again


@pytest.mark.slow
def test_speed_excludes_validation_time(corpus, tmp_path):
    """The rate of each logging interval excludes the two seconds of each validation."""
    often = ["--trainer.max_epochs=2", "--trainer.val_check_interval=5", "--trainer.log_every_n_steps=5"]
    run("fit", *small(corpus, tmp_path), *often, "--trainer.callbacks+=tests.dctrain.recorder.SlowValidation")
    rates = [event.value for event in scalars(tmp_path / "t/version_0")["train/tokens_per_second"]]
    assert len(rates) == 4 and min(rates) > 5 * 4 * 24 / 2


class Clock(Callback):
    """Simulated clock that advances by 1 second per batch and by 10 seconds per optimizer step."""

    now = 0.0

    def on_train_batch_start(self, *_) -> None:
        Clock.now += 1

    def on_before_optimizer_step(self, *_) -> None:
        Clock.now += 10


def test_speed_counts_whole_optimizer_steps(corpus, tmp_path, monkeypatch):
    """With gradient accumulation, a step has four batches of 4 x 24 tokens and takes 14 seconds."""
    monkeypatch.setattr("dctrain.callbacks.speed.time", SimpleNamespace(perf_counter=lambda: Clock.now))
    often = ["--trainer.max_steps=4", "--trainer.accumulate_grad_batches=4", f"--trainer.callbacks+={__name__}.Clock"]
    run("fit", *small(corpus, tmp_path), *often)
    rates = [event.value for event in scalars(tmp_path / "t/version_0")["train/tokens_per_second"]]
    assert rates == pytest.approx([4 * 4 * 24 / 14] * 2 + [2 * 4 * 24 / 12, 4 * 4 * 24 / 14])


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        (["--trainer.max_steps=7", "--trainer.val_check_interval=5", "--trainer.check_val_every_n_epoch=null"], [5, 7]),
        (["--trainer.max_epochs=3", "--trainer.check_val_every_n_epoch=2"], [20, 30]),
        (["--trainer.max_epochs=2", "--trainer.val_check_interval=4"], [4, 8, 14, 18, 20]),
        (["--trainer.max_epochs=2"], [10, 20]),
    ],
    ids=lambda options: options[0],
)
def test_last_step_is_validated_once(corpus, tmp_path, options, steps):
    """The last step is validated once, whether or not an interval ends there; a finished run is not validated again."""
    run("fit", *small(corpus, tmp_path), *options)
    assert [event.step for event in scalars(tmp_path / "t/version_0")["val/loss"]] == steps
    run("fit", *small(corpus, tmp_path), *options, "--resume=latest")
    assert [event.step for event in scalars(tmp_path / "t/version_0")["val/loss"]] == steps


DDP = ["--trainer.strategy=ddp"]


@pytest.mark.parametrize(
    ("strategy", "impl", "tolerance"),
    [
        pytest.param(DDP, "auto", 1e-10, id="ddp", marks=pytest.mark.long),
        pytest.param(FSDP, "auto", 1e-10, id="fsdp2", marks=pytest.mark.slow),
        pytest.param(DDP, "triton", 1e-5, id="ddp-triton", marks=pytest.mark.long),
        pytest.param(FSDP, "triton", 1e-5, id="fsdp2-triton", marks=pytest.mark.long),
    ],
)
def test_two_processes_match_one_process(corpus, tmp_path, strategy, impl, tolerance):
    """The losses of a shrunken 405M model agree at every step, in float64 or, for the Triton kernels, in float32."""
    few = "" if impl == "auto" else "num_layers: 2, num_heads: 4, "
    overrides = f"{{dim: 64, mlp_dim: 96, windows: [8, null], {few}impl: {impl}}}"
    shrunk = ["--model.model=dcformer_pp_405m", f"--model.overrides={overrides}"]
    common = [*shrunk, "--trainer.max_epochs=1", "--trainer.limit_train_batches=3"]
    if impl == "auto":
        common.append("--trainer.callbacks+=tests.dctrain.recorder.InFloat64")
    else:  # the Triton interpreter is slow
        common += ["--trainer.limit_train_batches=2", "--trainer.limit_val_batches=1", "--data.context_length=12"]
    run("fit", *small(corpus, tmp_path / "one"), *common, *record(tmp_path / "one"))
    two = ["--trainer.devices=2", "--data.batch_size=2", *strategy]
    both = spawn("fit", *small(corpus, tmp_path / "two"), *common, *two, *record(tmp_path / "two"))
    assert both.returncode == 0, both.stderr
    expected = read(tmp_path / "one")
    ranks = [read(tmp_path / "two", rank) for rank in (0, 1)]
    assert len(expected) == (3 if impl == "auto" else 2)
    for step, entry in expected.items():
        loss = sum(float.fromhex(rank[step]["loss"]) for rank in ranks) / 2
        assert loss == pytest.approx(float.fromhex(entry["loss"]), rel=tolerance), step
        assert sorted(ranks[0][step]["samples"] + ranks[1][step]["samples"]) == sorted(entry["samples"])
    states = [load_checkpoint(newest_checkpoint(tmp_path / name))["state_dict"] for name in ("one", "two")]
    assert states[0].keys() == states[1].keys()
    if impl == "auto":
        for key, value in states[0].items():
            torch.testing.assert_close(states[1][key], value, rtol=1e-8, atol=1e-10, msg=key)
    values = [scalars(tmp_path / name / "t/version_0")["val/loss"][0].value for name in ("one", "two")]
    assert impl != "auto" or values[0] == pytest.approx(
        values[1], rel=1e-6
    )  # seven sequences: each rank validates four, and one of the eight is padding


@pytest.mark.parametrize(
    "extra",
    [
        ["--model.model=transformer_debug"],
        ["--model.model=dcpythia_debug", "--model.decay_all=false"],
        ["--model.recompute=block", "--data.separate_documents=true"],
        pytest.param(["--model.compile=true", "--trainer.max_epochs=1"], marks=pytest.mark.long, id="compiled"),
        ["--trainer.precision=bf16-mixed", "--trainer.accumulate_grad_batches=2"],
    ],
    ids=lambda extra: extra[0].split("=")[-1],
)
def test_variants_train_to_finite_weights(corpus, tmp_path, extra):
    run("fit", *small(corpus, tmp_path), *extra)
    state = load_checkpoint(newest_checkpoint(tmp_path))["state_dict"]
    assert all(tensor.isfinite().all() for tensor in state.values())
    assert not any("_orig_mod" in key for key in state)


@pytest.mark.long
def test_fabric_launches_several_processes(corpus, tmp_path):
    program = str(Path(sys.executable).with_name("fabric"))
    fabric = (program, "run", "--accelerator=cpu", "--devices=2", "dclm/__main__.py")
    arguments = [*small(corpus, tmp_path), "--trainer.max_epochs=1", "--trainer.strategy=ddp", "--trainer.devices=2"]
    result = spawn("fit", *arguments, "--data.batch_size=2", prefix=fabric)
    assert result.returncode == 0, result.stderr
    assert load_checkpoint(newest_checkpoint(tmp_path))["TokenDataModule"]["global_batch"] == 4


def mistake(capsys, *args: str) -> str:
    """Run a command that must fail with exit code 2, and return its error output, which must have no traceback."""
    with pytest.raises(SystemExit) as exit_info:
        run(*args)
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


def test_invalid_options_report_error_without_traceback(corpus, tmp_path, capsys):
    arguments = small(corpus, tmp_path)
    for option, message in (
        ("--model.model=dcformer_pp_405", "model 'dcformer_pp_405' is unknown; expected transformer_debug"),
        ("--model.overrides={widnow: 3}", "unknown fields ['widnow']"),
        ("--model.overrides={vocab_size: 3}", "must not contain ['vocab_size']: data.vocab_size sets it"),
        ("--model.overrides={num_heads: 5}", "dim=128 must be divisible by num_heads=5"),
        ("--model.overrides={num_groups: 3}", "num_groups=3 must be a positive divisor of num_heads=4"),
        ("--model.overrides={impl: fast}", "impl='fast' is unknown"),
        ("--model.lr=-1", "lr=-1.0 must be in [0, 1e+06]"),
        ("--model.warmup_fraction=1", "warmup_fraction=1.0 must be in [0, 1)"),
        ("--data.vocab_size=100", "has a vocabulary of 257; data.vocab_size=100 must be at least that"),
        ("--data.context_length=2000", "a sequence needs 2000 and one more"),
        (f"--data.tokens={tmp_path}/none", "is not a prepared corpus (no manifest.json); see docs/data.md"),
        (f"--resume={tmp_path}/nothing", "error: no checkpoint"),
        ("--trainer.max_epochs=-1", "the run has no limit, which the schedule requires: set trainer.max_epochs or "),
        ("--trainer.max_epoch=3", "--trainer.max_epoch=3"),
        ("--trainer.strategy=nope", "trainer: You selected an invalid strategy name"),
        ("--trainer.devices=0", "trainer: "),
        ("--trainer.limit_train_batches=0", "trainer.limit_train_batches=0 leaves no data to train on"),
        ("--trainer.gradient_clip_algorithm=value", "trainer.gradient_clip_algorithm='value'; expected 'norm'"),
        ("--model.overrides={init_std: x}", "init_std='x' must be of type float or None"),
    ):
        assert message in mistake(capsys, "fit", *arguments, option), option
    assert "--checkpoint: expected a checkpoint (NAME.ckpt)" in mistake(capsys, "validate", *arguments)


def test_invalid_generate_options_report_error_without_traceback(trained, tmp_path, capsys):
    checkpoint = f"--checkpoint={trained / 't/version_0'}"
    for args, message in (
        ([checkpoint, "--prompt="], "prompt 0 has shape [0]; expected at least one token id"),
        ([checkpoint, "--prompt=a", "--temperature=-1"], "temperature=-1.0"),
        ([checkpoint, "--prompt=a", "--top_p=2"], "top_p=2.0 must be in (0, 1]"),
        ([f"--checkpoint={tmp_path}/no.ckpt", "--prompt=a"], "no checkpoint"),
        ([checkpoint, "--prompt=a", "--prompts=a"], "prompts"),
        ([checkpoint, "--prompt=a", "--device=nope"], "device='nope' cannot be used"),
        ([checkpoint, "--prompt=a", "--prompt=b"], "--prompt is given twice"),
        ([checkpoint], "prompt"),
    ):
        assert message in mistake(capsys, "generate", *args), args
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    assert "is not a checkpoint of dclm" in mistake(
        capsys, "generate", f"--checkpoint={tmp_path / 'other.ckpt'}", "--prompt=a"
    )


def test_checkpoint_of_different_architecture_is_rejected(trained, capsys):
    error = mistake(
        capsys,
        *("validate", f"--config={trained / 't/version_0/config.yaml'}", f"--checkpoint={trained / 't/version_0'}"),
        "--model.model=transformer_pp_debug",
    )
    assert "trained with model='dcformer_pp_debug', here 'transformer_pp_debug'" in error


@pytest.mark.slow
def test_make_tokens_script_prepares_corpus(tmp_path, capsys):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(TEXT + name)
    command = [sys.executable, "data/make_tokens.py", "--inputs", str(tmp_path), "--out", str(tmp_path / "out")]
    done = subprocess.run([*command, "--val_fraction=0"], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"{2 * (len(TEXT) + 6)} train tokens, 0 val tokens; vocabulary 257" in done.stdout
    assert "was prepared with different val_fraction" in mistake(capsys, "tokens", *command[2:])


def test_export_uses_native_format_for_options_outside_published_format(corpus, tmp_path, capsys):
    llama = ["--model.model=transformer_pp_debug", "--trainer.max_epochs=1", "--trainer.limit_train_batches=1"]
    llama.append("--model.overrides={num_layers: 1, dim: 32, mlp_dim: 48, num_kv_heads: 2}")
    run("fit", *small(corpus, tmp_path), *llama)
    run("export", f"--checkpoint={tmp_path / 't/version_0'}", f"--out={tmp_path / 'out'}")
    out = capsys.readouterr().out
    assert "in the native format" in out and "num_kv_heads=2" in out
    assert dclm.load_pretrained(tmp_path / "out").config.num_kv_heads == 2
