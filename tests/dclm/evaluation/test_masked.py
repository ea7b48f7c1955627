"""Measures of masked tokens: agreement with full logits, and rejection of causal models and empty texts."""

import json

import numpy as np
import pytest
import torch

import dclm
from dclm.data.masking import Masking
from dclm.loss import IGNORED

from ..commands import run, small
from ..data.corpora import numbered_corpus
from .models import SOURCES, numbers, pile, small_folder


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Return the folder of a short run on masked bytes whose context is shorter than the texts."""
    monkeypatch.chdir(tmp_path)
    masked = ["--data.mask_fraction=0.15", "--data.vocab_size=258", "--trainer.max_steps=3"]
    overrides = "--model.overrides={num_layers: 2, dim: 32, mlp_dim: 48, windows: [8, null], is_causal: false}"
    run("fit", *small(numbered_corpus(tmp_path / "corpus"), tmp_path), *masked, overrides)
    return tmp_path / "t/version_0"


def test_training_logs_accuracy_but_not_bits_per_byte(trained):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tags = EventAccumulator(str(trained)).Reload().Tags()["scalars"]
    assert {"val/loss", "val/accuracy"} <= set(tags) and "val/bits_per_byte" not in tags


@torch.no_grad()
@pytest.mark.parametrize(("fraction", "span"), [(0.15, 1), (0.4, 3.8)])
def test_masked_measures_match_full_logits(trained, fraction, span, tmp_path):
    pile(tmp_path / "pile.jsonl")
    options = [f"--mask_fraction={fraction}", f"--mask_span={span}", "--batch_size=5"]
    run("evaluate", f"--checkpoint={trained}", "--masked", "pile.jsonl", "--out=out", *options)
    found = numbers(tmp_path / "out/t-version_0.json")
    decoder, words = dclm.load_model(trained)
    assert not decoder.config.is_causal and decoder.config.context_length == 24
    masking, number, nats, right = Masking(fraction, span, 257, (256,)), 0, [], []
    for source in [None, *SOURCES]:
        row = words.encode(["" if source is None else source.read_text()[:3000]])[0].tolist()
        row = np.array([256, *row])
        for start in range(0, len(row), 24):
            inputs, targets = map(torch.from_numpy, masking(row[start : start + 24], (0, number)))
            logits = decoder(inputs[None])[0].double()
            asked = targets != IGNORED
            nats += (-logits.log_softmax(-1)[asked, targets[asked]]).tolist()
            right += (logits.argmax(-1) == targets)[asked].tolist()
            number += 1
    assert found["pile.jsonl", "masked_loss"] == pytest.approx(np.mean(nats), rel=1e-5)
    assert found["pile.jsonl", "masked_accuracy"] == pytest.approx(np.mean(right))
    entry = json.loads((tmp_path / "out/t-version_0.json").read_text())["results"]["masked pile.jsonl"]
    assert f"{fraction:.0%} masked, spans of {span}" in entry["note"] and entry["settings"]["mask_span"] == span


def test_unsupported_commands_and_inputs_are_rejected(trained, tmp_path, capsys):
    (tmp_path / "short.txt").write_text("a text")
    (tmp_path / "empty.txt").write_text("")
    small_folder(tmp_path / "causal")
    for args, said in (
        (("evaluate", "--texts", "short.txt"), "the model is bidirectional"),
        (("evaluate", "--masked", "short.txt", "--mask_fraction=2"), "mask_fraction=2.0 must be in"),
        (("evaluate", "--masked", "empty.txt"), "has too little text to score"),
        (("evaluate", "--masked", "short.txt", "--checkpoint=causal"), "masked requires a bidirectional model"),
        (("generate", "--prompt=a"), "the model is bidirectional"),
    ):
        command, *options = args
        if "--checkpoint=causal" not in options:
            options.append(f"--checkpoint={trained}")
        if command != "generate":
            options.append("--out=out")
        with pytest.raises(SystemExit) as exit_info:
            run(command, *options)
        error = capsys.readouterr().err
        assert exit_info.value.code == 2 and said in error and "Traceback" not in error, args


def test_masked_model_is_exported_in_native_format(trained, tmp_path, capsys):
    run("export", f"--checkpoint={trained}", f"--out={tmp_path / 'out'}")
    assert "in the native format" in capsys.readouterr().out
    assert not dclm.load_pretrained(tmp_path / "out").config.is_causal


def test_changed_direction_or_masking_of_a_run_is_rejected(trained, tmp_path, capsys):
    config = [f"--config={trained}/config.yaml"]
    causal = "--model.overrides={num_layers: 2, dim: 32, mlp_dim: 48, windows: [8, null]}"
    for args, said in (
        (
            ("validate", *config, causal, "--data.mask_fraction=null", f"--checkpoint={trained}"),
            "is_causal=False, here True",
        ),
        (
            ("fit", *config, "--data.mask_fraction=0.3", f"--resume={trained}", "--trainer.max_steps=5"),
            "mask_fraction=0.15",
        ),
        (("fit", *config, "--data.mask_span=2", f"--resume={trained}", "--trainer.max_steps=5"), "mask_span=1"),
    ):
        with pytest.raises(SystemExit) as exit_info:
            run(*args)
        error = capsys.readouterr().err
        assert exit_info.value.code == 2 and said in error and "Traceback" not in error, args


@pytest.mark.parametrize("command", ["fit", "plan"])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model.overrides={is_causal: false}"], "is_causal=False with data.mask_fraction=None"),
        (["--data.mask_fraction=0.15", "--data.vocab_size=258"], "is_causal=True with data.mask_fraction=0.15"),
    ],
)
def test_different_objectives_of_model_and_data_are_rejected(options, said, command, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(command, *small(numbered_corpus(tmp_path / "corpus"), tmp_path), *options)
    assert said in capsys.readouterr().err
