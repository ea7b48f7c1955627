"""Windows predict each token once, and measures equal those of whole texts."""

import math

import pytest
import torch

import dclm
from dclm.evaluation.measures import windows
from dclm.evaluation.scorer import Prompt, Scorer
from dclm.sampling import Sampling
from dctrain.evaluation.answer_cache import AnswerCache
from dctrain.evaluation.ranks import EvaluationRanks

from ..commands import run
from .models import SOURCES, numbers, pile, small_folder, spans


@pytest.mark.parametrize("stride", [1, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 16, 21])
@pytest.mark.parametrize("begin", [[99], [98, 99]])
def test_windows_predict_each_token_once_with_maximum_context(count, stride, begin):
    ids = list(range(count))
    found = list(windows(ids, begin, 8, stride))
    assert [token for _, targets in found for token in targets] == ids
    text, end = [*begin, *ids], len(begin)
    for number, (context, targets) in enumerate(found):
        end += len(targets)
        assert len(targets) <= (8 if number == 0 else stride)
        assert len(context) + len(targets) <= 9
        assert text[end - len(context) - len(targets) : end] == [*context, *targets]
        assert len(context) + len(targets) == min(9, end)


@torch.no_grad()
def test_text_and_span_measures_match_full_logits(tmp_path, monkeypatch):
    """Every document fits into the context, so the logits of a single forward pass are the reference."""
    monkeypatch.chdir(tmp_path)
    folder = small_folder(tmp_path / "model", context_length=2048)
    pile(tmp_path / "pile.jsonl"), spans(tmp_path / "flan.jsonl")
    run("evaluate", "--checkpoint=model", "--texts", "pile.jsonl", "--spans", "flan.jsonl", "--out=out")
    found = numbers(tmp_path / "out" / "model.json")
    decoder, tokenizer = dclm.load_model(folder)

    def nats(context, continuation):
        logits = decoder(torch.tensor([[*context, *continuation]]))[0, len(context) - 1 : -1].double()
        return -logits.log_softmax(-1)[range(len(continuation)), continuation].sum().item()

    parts = {0: [0.0, 0, 0], 1: [0.0, 0, 0]}
    for number, source in enumerate(SOURCES, 1):
        text = source.read_text()[:3000]
        row = tokenizer.encode([text])[0].tolist()
        for place, value in enumerate((nats([tokenizer.eos_id], row), len(row), len(text.encode()))):
            parts[number % 2][place] += value
    total = [sum(values) for values in zip(*parts.values(), strict=True)]
    for name, (loss, tokens, size) in {
        "pile.jsonl": total,
        "pile.jsonl: part 0": parts[0],
        "pile.jsonl: part 1": parts[1],
    }.items():
        assert found[name, "perplexity"] == pytest.approx(math.exp(loss / tokens), rel=1e-5)
        assert found[name, "bits_per_byte"] == pytest.approx(loss / math.log(2) / size, rel=1e-5)
    encoded = [tokenizer.encode([f"What is {n} plus {n}?\n", f"It is {n + n}."]) for n in range(12)]
    pairs = [(prompt.tolist(), target.tolist()) for prompt, target in encoded]
    loss = sum(nats(*pair) for pair in pairs) / sum(len(target) for _, target in pairs)
    assert found["flan.jsonl", "target_perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)


def test_complete_returns_empty_text_for_immediate_stop_string(tmp_path):
    alone, model = EvaluationRanks(0, 1, 0), dclm.load_model(small_folder(tmp_path / "model"))
    prompt = tuple(model.tokenizer.encode(["import abc"])[0].tolist())
    scorer = Scorer(model, alone, AnswerCache(tmp_path, "test", {}, alone), 2, 64)
    (text,) = scorer.complete([Prompt(prompt, 5, (), Sampling(0.0, None, None))])
    assert text and scorer.complete([Prompt(prompt, 5, (text[0],), Sampling(0.0, None, None))]) == [""]
