"""Outputs and settings of commands that could be lost or ignored silently."""

import pytest

from tests.conftest import numbered_samples, write_shard
from tests.dclm.commands import run as run_dclm
from tests.dclm.commands import small as small_lm
from tests.dcvision.commands import run, small

from .fault_injection import mistake


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("outputs")
    write_shard(root / "s-0.tar", numbered_samples(8))
    arguments = [*small(f"{root}/s-0.tar", root), "--trainer.max_epochs=1"]
    run("fit", *arguments)
    return arguments, f"--checkpoint={root}/t/version_0"


def test_predictions_are_written_through_symlink(trained, tmp_path, capsys):
    arguments, checkpoint = trained
    target, link = tmp_path / "target.csv", tmp_path / "link.csv"
    target.write_text("old")
    link.symlink_to(target)
    run("predict", *arguments, checkpoint, f"--out={link}")
    assert link.is_symlink() and target.read_text().startswith("name,class")


def test_predict_rejects_invalid_output_path(trained, tmp_path, capsys):
    arguments, checkpoint = trained
    (tmp_path / "file").touch()
    (tmp_path / "device").symlink_to("/dev/null")
    for out, message in (("", "is a folder"), ("device", "is not a regular file"), ("file/x.csv", "not a folder")):
        error = mistake(capsys, run, "predict", *arguments, checkpoint, f"--out={tmp_path / out}")
        assert f"out={tmp_path / out}".rstrip("/") in error and message in error


@pytest.mark.parametrize(
    ("command", "option"),
    [("validate", "limit_val_batches"), ("test", "limit_test_batches"), ("predict", "limit_predict_batches")],
)
def test_evaluation_without_batches_is_rejected(trained, capsys, command, option):
    arguments, checkpoint = trained
    assert f"trainer.{option}=0" in mistake(capsys, run, command, *arguments, checkpoint, f"--trainer.{option}=0")


def test_validate_rejects_init(trained, capsys):
    arguments, checkpoint = trained
    assert "init=other" in mistake(capsys, run, "validate", *arguments, checkpoint, "--init=other")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--seed_everything=true", "seed_everything: expected a number"),
        ("--trainer.default_root_dir=s3://bucket/runs", "trainer.default_root_dir=s3://bucket/runs"),
    ],
)
def test_settings_that_lightning_would_misinterpret_are_rejected(trained, capsys, option, message):
    assert message in mistake(capsys, run, "fit", *trained[0], option)


@pytest.mark.parametrize("first", [[], ["--trainer.callbacks=EMAWeightAveraging"]], ids=["plain", "averaged"])
def test_resume_rejects_added_or_removed_weight_averaging(corpus, tmp_path, capsys, first):
    second = [] if first else ["--trainer.callbacks=EMAWeightAveraging"]
    run_dclm("fit", *small_lm(corpus, tmp_path), *first, "--trainer.max_steps=2")
    resume = [f"--resume={tmp_path}/t/version_0", "--trainer.max_steps=4"]
    error = mistake(capsys, run_dclm, "fit", *small_lm(corpus, tmp_path), *second, *resume)
    assert "trainer.callbacks: the run was trained" in error
    run_dclm("fit", *small_lm(corpus, tmp_path), *first, *resume)


def test_comparison_is_written_only_to_given_folder(trained_lm, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("a text of some words")
    run_dclm("evaluate", f"--checkpoint={trained_lm}", "--texts=a.txt", "--out=first")
    result = next(path for path in (tmp_path / "first").glob("*.json"))
    run_dclm("evaluate", f"--compare={result}", "--out=second")
    assert (tmp_path / "second" / "table.md").read_text() == (tmp_path / "first" / "table.md").read_text()
    run_dclm("evaluate", f"--compare={result}")
    assert not (tmp_path / "evaluation").exists()


@pytest.mark.parametrize(
    "variables", [{"WORLD_SIZE": "2"}, {"RANK": "x", "WORLD_SIZE": "2"}, {"RANK": "3", "WORLD_SIZE": "2"}], ids=str
)
def test_incomplete_or_invalid_launcher_variables_are_rejected(trained_lm, tmp_path, capsys, monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    error = mistake(
        capsys, run_dclm, "evaluate", f"--checkpoint={trained_lm}", "--texts", __file__, f"--out={tmp_path}"
    )
    assert "WORLD_SIZE" in error
    if "x" in variables.values():
        assert "RANK='x'" in mistake(capsys, run_dclm, "fit")


def test_unreadable_tokenizer_and_binary_text_are_rejected(trained_lm, tmp_path, capsys):
    for content in (b"", b"\xb2\x00"):
        (tmp_path / "tokenizer.json").write_bytes(content)
        given = [f"--checkpoint={trained_lm}", "--prompt=a", f"--tokenizer={tmp_path}/tokenizer.json"]
        assert f"tokenizer={tmp_path}/tokenizer.json" in mistake(capsys, run_dclm, "generate", *given)
    (tmp_path / "junk.bin").write_bytes(b"\xb2\x00" * 100)
    error = mistake(capsys, run_dclm, "tokens", f"--inputs={tmp_path}/junk.bin", f"--out={tmp_path}/tokens")
    assert "1 of 1 files are not UTF-8" in error


def test_experiment_is_rejected_as_config(capsys):
    assert "config=experiments/digits is an experiment" in mistake(capsys, run, "fit", "--config", "experiments/digits")
