"""Scoring of other transformers models: agreement with their logits, and rejection of unsupported models."""

import io
import json
import math
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, BertLMHeadModel, GPT2Config, GPT2LMHeadModel, MambaConfig

from dclm.data.tokenizers import train_bpe
from dclm.evaluation.scorer import Prompt, Scorer
from dclm.load import load_scored
from dclm.sampling import Sampling
from dclm.synthetic_tasks import TASKS, make_suite, write_texts
from dctrain.errors import UserError
from dctrain.evaluation.answer_cache import AnswerCache
from dctrain.evaluation.ranks import EvaluationRanks

from ..commands import run
from ..evaluation.models import SOURCES, numbers, pile


def gpt2(folder, **options):
    """Save a GPT-2 model with clearly non-uniform logits and its tokenizer, and return the folder."""
    tokenizer = train_bpe([path.read_text() for path in SOURCES], 400)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=400, n_positions=256, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3)
    GPT2LMHeadModel(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer.spec)
    return folder


@torch.no_grad()
def test_perplexity_matches_logits_of_the_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = gpt2(tmp_path / "gpt2")
    pile(tmp_path / "pile.jsonl"), write_texts(tmp_path / "suite.jsonl", make_suite(tasks=TASKS[:1], count=1))
    run("evaluate", "--checkpoint=gpt2", "--texts", "pile.jsonl", "--suites", "suite.jsonl", "--out=out")
    found = numbers(tmp_path / "out/gpt2.json")
    assert ("suite.jsonl", "exact_match") in found

    model, (_, words) = AutoModelForCausalLM.from_pretrained(folder), load_scored(folder)
    nats = count = 0
    for source in SOURCES:
        row = [words.eos_id, *words.encode([source.read_text()[:3000]])[0].tolist()]
        first, end = 1, min(257, len(row))
        while first < len(row):
            window = torch.tensor([row[max(0, end - 257) : end]])
            logits = model(window[:, :-1]).logits[0].log_softmax(-1)
            wanted = window[0, 1:][-(end - first) :]
            nats -= logits[-(end - first) :].gather(1, wanted[:, None]).sum().item()
            count += end - first
            first, end = end, min(end + 256, len(row))
    assert found["pile.jsonl", "perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-4)


def mistake(capsys, *args) -> str:
    with pytest.raises(SystemExit) as exit_info:
        run("evaluate", *args)
    error = capsys.readouterr().err
    assert exit_info.value.code == 2 and "Traceback" not in error
    return error


def test_unsupported_models_and_options_are_rejected(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pile(tmp_path / "pile.jsonl")
    gpt2(tmp_path / "gpt2")
    config = BertConfig(
        vocab_size=400, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    BertLMHeadModel(config).save_pretrained(tmp_path / "bert")
    MambaConfig().save_pretrained(tmp_path / "mamba")
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange/config.json").write_text(json.dumps({"model_type": "strange"}))
    for folder, options, said in (
        ("bert", [], "is not a causal language model"),
        ("mamba", [], "transformers cannot load mamba either"),
        ("strange", [], "transformers cannot load strange either"),
        ("gpt2", ["--context_length=257"], "context_length=257 exceeds the model's position table of 256"),
        ("gpt2", ["--masked=pile.jsonl"], "masked requires a bidirectional model"),
    ):
        said_now = mistake(capsys, f"--checkpoint={folder}", "--texts", "pile.jsonl", "--out=out", *options)
        assert said in said_now, (folder, said_now)


def test_generation_is_rejected(tmp_path):
    alone = EvaluationRanks(0, 1, 0)
    scorer = Scorer(load_scored(gpt2(tmp_path / "gpt2")), alone, AnswerCache(tmp_path, "test", {}, alone), 5, 64)
    with pytest.raises(UserError, match="type 'gpt2' supports scoring only, not generation"):
        scorer.complete([Prompt((1, 2), 3, (), Sampling(0.0, None, None))])


def test_code_in_model_folder_is_not_executed(tmp_path, capsys, monkeypatch):
    """The user is not asked for confirmation; transformers would accept a "y" from the standard input."""
    config = {"model_type": "own", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'pwned')!r}).touch()\n")
    monkeypatch.setattr("builtins.input", lambda *args: pytest.fail("asked"))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\ny\n"))
    assert str(tmp_path) in mistake(capsys, f"--checkpoint={tmp_path}", "--texts", __file__, f"--out={tmp_path}/out")
    assert not (tmp_path / "pwned").exists()
