"""Tasks of the lm-evaluation-harness from local files: agreement with its Hugging Face model, and error messages."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.faults.fault_injection import mistake

from ..commands import run
from .models import numbers, small_folder, write_records

pytestmark = pytest.mark.slow  # importing the libraries takes seconds
QUESTIONS = [
    {
        "question": f"What is {a} plus {b}?",
        "choices": [str(a + b), str(a * b + 1), "none of these", str(a + b) + "0"],
        "text": f"{a} and {b} make {a + b}. " * (1 + 5 * a),
    }
    for a in range(3)
    for b in range(4)
]
COMMON = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
fewshot_split: test
"""
TASKS = {
    "sums": """output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "last": """output_type: loglikelihood
doc_to_text: "{{question}}"
doc_to_target: " {{choices[0]}}"
metric_list: [{metric: perplexity}, {metric: acc}]
""",
    "rolling": """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "write": """output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["e", "Question"], max_gen_toks: 12}
metric_list: [{metric: exact_match}]
""",
    "again": """output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
repeats: 4
generation_kwargs: {until: ["zz"], max_gen_toks: 12, do_sample: true, temperature: 1.0, top_k: 0}
metric_list: [{metric: exact_match}]
""",
    "missing": """output_type: loglikelihood
doc_to_text: "{{question}}"
doc_to_target: "a"
metric_list: [{metric: acc}]
""",
}


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """Return a folder of task files; the data of the last task is missing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    file = write_records(tmp_path / "questions.jsonl", QUESTIONS)
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, text in TASKS.items():
        data = tmp_path / "none.jsonl" if name == "missing" else file
        (folder / f"{name}.yaml").write_text(COMMON.format(name=name, file=data) + text)
    return folder


def pythia(folder, bos=True):
    """Save a random Pythia model and a tokenizer with transformers, and return their folder."""
    import torch
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast

    small_folder(folder / "ours")
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0, "max_position_embeddings": 64}
    model = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=400, **shape, **ends))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() > 1 else 1)
    model.save_pretrained(folder / "pythia")
    end = "<|endoftext|>"
    words = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "ours" / "tokenizer.json"), bos_token=end, eos_token=end, pad_token=end
    )
    words.save_pretrained(folder / "pythia")
    return folder / "pythia"


def test_answers_match_huggingface_model_of_harness(tasks, tmp_path):
    """Covers all types of requests, including few-shot prompts that exceed the context."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from dclm import load_model
    from dclm.evaluation.harness import Model
    from dclm.evaluation.scorer import Scorer
    from dctrain.evaluation.answer_cache import AnswerCache
    from dctrain.evaluation.ranks import EvaluationRanks

    folder, alone = pythia(tmp_path), EvaluationRanks(0, 1, 0)
    theirs = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=3)
    scorer = Scorer(load_model(folder), alone, AnswerCache(tmp_path, "test", {}, alone), 5, 64)
    for shots in (0, 3):
        answers = []
        for model in (theirs, Model(scorer, "test")):
            manager = TaskManager(include_path=str(tasks), include_defaults=False)
            names = ["sums", "last", "rolling", "write"]
            options = {"num_fewshot": shots, "task_manager": manager, "bootstrap_iters": 0}
            answers.append(lm_eval.simple_evaluate(model, tasks=names, **options))
        expected, got = (found["samples"] for found in answers)
        for name in expected:
            for one, other in zip(expected[name], got[name], strict=True):
                for reply, ours in zip(one["resps"], other["resps"], strict=True):
                    if isinstance(reply[0], str):
                        assert ours == reply
                    else:
                        value, mine = (r[0][0] if isinstance(r[0], tuple | list) else r[0] for r in (reply, ours))
                        assert float(mine) == pytest.approx(float(value), abs=1e-4), name
        for name, values in answers[0]["results"].items():
            for key, value in values.items():
                if isinstance(value, float):
                    assert answers[1]["results"][name][key] == pytest.approx(value, rel=1e-5), (name, key)
    assert len({reply for sample in got["write"] for (reply,) in sample["resps"]}) > 1


def test_command_evaluates_tasks_by_name_and_number_of_shots(tasks, tmp_path, capsys):
    small_folder(tmp_path / "model")
    asked = ["--checkpoint=model", "--tasks", "sums", "last", "--num_fewshot", "0", "2", "--task_folder=tasks"]
    run("evaluate", *asked, "--limit=8")
    found = numbers(tmp_path / "evaluation" / "model.json")
    names = {name for name, _ in found}
    assert names == {f"{task}, {shots}-shot" for task in ("sums", "last") for shots in (0, 2)}
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    mean = 100 * (found["sums, 2-shot", "acc"] + found["last, 2-shot", "acc"]) / 2
    assert any("mean of 2 tasks, 2-shot" in row and f"{mean:.1f}" in row for row in rows)
    entry = json.loads((tmp_path / "evaluation" / "model.json").read_text())["results"]["task sums, 0-shot"]
    assert entry["settings"]["limit"] == 8 and entry["measures"][0]["count"] == 8
    assert entry["measures"][0]["stderr"] > 0


@pytest.mark.long
def test_tasks_are_evaluated_again_only_if_their_data_changes(tasks, tmp_path, monkeypatch):
    from dclm.evaluation import harness

    small_folder(tmp_path / "model")
    asked = ("evaluate", "--checkpoint=model", "--tasks", "last", "rolling", "--task_folder=tasks")
    run(*asked)
    calls, ask = [], harness.lm_eval.simple_evaluate
    monkeypatch.setattr(harness.lm_eval, "simple_evaluate", lambda *a, **k: calls.append(1) or ask(*a, **k))
    again = subprocess.run([sys.executable, "-m", "dclm", *asked], capture_output=True, text=True, check=True)
    assert "measured" not in again.stdout
    write_records(tmp_path / "questions.jsonl", QUESTIONS[:5])
    harness._content.cache_clear()
    run(*asked)
    assert len(calls) == 2
    entry = json.loads((tmp_path / "evaluation" / "model.json").read_text())["results"]["task last"]
    assert entry["measures"][0]["count"] == 5


def test_repeated_questions_are_sampled_independently_and_reproducibly(tasks, tmp_path, monkeypatch):
    from dclm.evaluation import harness

    small_folder(tmp_path / "model")
    found, ask = [], harness.Model.generate_until

    def generate_until(self, requests):
        found.append([(request.args[0], text) for request, text in zip(requests, ask(self, requests), strict=True)])
        return [text for _, text in found[-1]]

    monkeypatch.setattr(harness.Model, "generate_until", generate_until)
    for size in (1, 5):
        options = ["--task_folder=tasks", "--limit=3", f"--batch_size={size}", f"--out=out{size}"]
        run("evaluate", "--checkpoint=model", "--tasks", "again", *options)
    assert found[0] == found[1] and len(found[0]) == 12
    assert len(set(found[0])) > 9


def test_invalid_tasks_report_error_and_earlier_results_are_kept(tasks, tmp_path, capsys):
    small_folder(tmp_path / "model")
    asked = ("evaluate", "--checkpoint=model", "--task_folder=tasks")
    error = mistake(capsys, run, *asked, "--tasks", "sumz")
    assert "task 'sumz' is unknown to the lm-evaluation-harness" in error and "sums" in error.partition("similar")[2]
    error = mistake(capsys, run, *asked, "--tasks", "sums", "missing")
    assert "task missing: cannot load its file or data" in error
    assert ("sums, 0-shot", "acc") in numbers(tmp_path / "evaluation" / "model.json")
    error = mistake(capsys, run, "evaluate", "--checkpoint=model", "--tasks", "sums", "--task_folder=none")
    assert "task_folder=none is not a folder" in error
    error = mistake(capsys, run, *asked, "--tasks", "write", "--context_length=12")
    assert "12 new tokens do not fit into a context of 12" in error


TABLE_4 = Path(__file__).parents[3] / "configs" / "evaluate" / "table4.yaml"


@pytest.mark.long
def test_eleven_tasks_of_table_4_are_found(tmp_path, monkeypatch):
    """The data of the tasks is not available; the task file of RACE-M is evaluated on records of the same format."""
    from dclm.evaluation.harness import find_tasks

    monkeypatch.chdir(TABLE_4.parents[2])
    config = yaml.safe_load(TABLE_4.read_text())
    asked = find_tasks(config["tasks"], config["num_fewshot"], None, config["task_folder"])
    assert len(asked) == 22 and {task.num_fewshot for task in asked} == {0, 5}
    task = yaml.safe_load((Path(config["task_folder"]) / "race_middle.yaml").read_text())
    records = [
        {"article": f"It is {n}.", "question": "What is it?", "options": list("wxyz"), "answer": "ABCD"[n % 4]}
        for n in range(8)
    ]
    file = write_records(tmp_path / "race.jsonl", records)
    task |= {"dataset_path": "json", "dataset_name": None, "fewshot_split": "test"}
    task["dataset_kwargs"] = {"data_files": {"test": str(file)}}
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "race_middle.yaml").write_text(yaml.safe_dump(task))
    monkeypatch.chdir(tmp_path)
    small_folder(tmp_path / "model")
    spans = write_records(tmp_path / "s.jsonl", [{"inputs": "a", "targets": "b"}])
    run(
        *("evaluate", "--config", str(TABLE_4), "--checkpoint=model", "--tasks", "race_middle", "--num_fewshot", "2"),
        *("--task_folder=tasks", "--spans", str(spans)),
        *("--texts", str(file.with_name("tasks") / "race_middle.yaml"), "--device=cpu", "--dtype=float32"),
    )
    found = numbers(tmp_path / "evaluation" / "model.json")
    assert 0 <= found["race_middle, 2-shot", "acc"] <= 1 and found["s.jsonl", "target_perplexity"] > 1
