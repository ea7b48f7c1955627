"""Tasks as training data: texts depend only on their index, targets are answers, and combinations are held out."""

import signal

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dclm.callbacks import UnseenAccuracy
from dclm.data import TokenDataModule
from dclm.data.samples import collate
from dclm.loss import IGNORED
from dclm.synthetic_tasks import make_suite, read_texts, words
from dclm.synthetic_tasks.stream import (
    CAST,
    DRAWN_TASKS,
    ENDLESS,
    HELD_OUT,
    TRAINED,
    UNSEEN,
    TaskStream,
    task_tokenizer,
)
from dctrain.data.sampler import SampleRef
from dctrain.errors import UserError
from tests.dctrain.commands import record
from tests.dctrain.recorder import read

from .commands import run

SMALL = [
    *("--trainer.accelerator=cpu", "--trainer.val_check_interval=2", "--trainer.enable_progress_bar=false"),
    *("--trainer.log_every_n_steps=1", "--data.context_length=64", "--data.batch_size=2", "--data.val_tokens=256"),
    *("--model.overrides={num_layers: 1}", "--trainer.enable_model_summary=false"),
]


def scalars(folder) -> dict[str, list[float]]:
    log = EventAccumulator(str(folder)).Reload()
    return {tag: [event.value for event in log.Scalars(tag)] for tag in log.Tags()["scalars"]}


def test_every_word_of_the_suite_is_a_token():
    tokenizer = task_tokenizer()
    texts = [text.text.replace("[ ", "").replace(" ]", "") for text in make_suite(7)]
    assert all((row != tokenizer.eos_id).all() for row in tokenizer.encode(texts))
    assert tokenizer.decode(tokenizer.encode(["Paris attracts Kate."])[0]).split() == ["Paris", "attracts", "Kate", "."]


def test_held_out_combinations_consist_of_trained_parts():
    trained = {(task.pattern, task.transformation) for task in TRAINED}
    assert trained.isdisjoint(HELD_OUT) and len(TRAINED) + len(UNSEEN) == len(DRAWN_TASKS)
    assert {(task.pattern, task.transformation) for task in UNSEEN} == HELD_OUT
    for pattern, transformation in HELD_OUT:
        assert any(pattern == other for other, _ in trained)
        assert any(transformation == other for _, other in trained)


@pytest.mark.parametrize("split", ["train", "val", "unseen"])
def test_texts_depend_only_on_their_index_and_targets_are_answers(split):
    texts, tokenizer = TaskStream().texts(split, 96), task_tokenizer()
    assert len(texts) == ENDLESS
    samples = [texts[SampleRef(number, 0)] for number in (0, 1, ENDLESS - 1, 1)]
    assert np.array_equal(samples[1].input_ids, samples[3].input_ids)
    assert not np.array_equal(samples[0].input_ids, samples[1].input_ids)
    for sample in samples:
        assert sample.input_ids.shape == sample.targets.shape == (96,)
        lines = tokenizer.decode(sample.input_ids).split("\n")[:-1]
        asked = sample.targets[sample.targets != IGNORED]
        answers = [tokenizer.decode([token]) for token in asked]
        assert [line.split()[-1] for line in lines] == answers[: len(lines)] and answers
        following = sample.input_ids[1:][sample.targets[:-1] != IGNORED]
        assert np.array_equal(following, asked[: len(following)])
    assert torch.equal(collate(samples).targets, torch.from_numpy(np.stack([sample.targets for sample in samples])))


def test_train_and_val_splits_differ():
    first = {split: TaskStream().texts(split, 96)[SampleRef(0, 0)].input_ids.tobytes() for split in ("train", "val")}
    assert first["train"] != first["val"]


@pytest.mark.slow
def test_run_resumes_exactly_and_logs_accuracies(tmp_path):
    fit = ["fit", "--config=configs/lm/compose_tasks.yaml", *SMALL, f"--trainer.default_root_dir={tmp_path}"]
    fit.append("--trainer.max_steps=4")
    run(*fit, "--name=whole", *record(tmp_path / "whole-steps"))
    run(*fit, "--name=part", *record(tmp_path / "part-steps", signum=int(signal.SIGTERM), at=2))
    run(*fit, f"--resume={tmp_path}/part/version_0", *record(tmp_path / "part-steps"))
    assert read(tmp_path / "part-steps") == read(tmp_path / "whole-steps")
    whole, part = (scalars(tmp_path / name / "version_0") for name in ("whole", "part"))
    for tag in ("val/loss", "val/accuracy", "val/unseen_accuracy"):
        assert whole[tag][-1] == part[tag][-1], tag
    assert "val/bits_per_byte" not in whole


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: TaskStream().texts("train", 8), "data.context_length=8 is too short for an example of same-person"),
        (lambda: TokenDataModule("tasks", val_tokens=None), "requires a finite data.val_tokens"),
        (lambda: TokenDataModule("tasks", validation="stdlib"), "and no validation, tokenizer"),
        (lambda: TokenDataModule("tasks", separate_documents=True), "requires a finite data.val_tokens"),
        (lambda: UnseenAccuracy(0), "texts=0 must be at least 1"),
    ],
)
def test_invalid_options_raise_user_error(make, said):
    with pytest.raises(UserError) as error:
        make()
    assert said in str(error.value)


@pytest.mark.parametrize(("combinations", "tasks"), [("trained", TRAINED), ("unseen", UNSEEN)])
def test_suite_command_writes_texts_of_the_stream(tmp_path, combinations, tasks):
    run("suite", f"--out={tmp_path}/s.jsonl", f"--combinations={combinations}")
    texts = read_texts(tmp_path / "s.jsonl")
    assert {text.task_id for text in texts} == {task.id for task in tasks} and len(texts) == 12 * len(tasks)
    people = {name for text in texts for name in words.NAMES if name in text.text.split()}
    assert people == set(CAST.names)
