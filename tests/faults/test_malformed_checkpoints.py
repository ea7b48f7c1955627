"""Checkpoints with malformed content that `torch.load` can read. Every command rejects them with one line."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from dctrain.checkpointing.checkpoint import check_resumable, find_checkpoint, load_checkpoint, newest_checkpoint
from dctrain.errors import UserError
from tests.conftest import numbered_samples, write_shard
from tests.dclm.commands import run as run_dclm
from tests.dclm.commands import small as small_dclm
from tests.dclm.data.corpora import numbered_corpus
from tests.dcvision.commands import run as run_dcvision
from tests.dcvision.commands import small as small_dcvision

from .fault_injection import mistake

Change = Callable[[dict], object]
HP, LOOPS = "hyper_parameters", "loops"


def put(*keys_and_value: object) -> Change:
    """Return a change that sets `content[key][key]... = value`."""
    *keys, last, value = keys_and_value

    def change(content: dict) -> None:
        for key in keys:
            content = content[key]
        content[last] = value

    return change


def drop(*keys: object) -> Change:
    """Return a change that removes `content[key][key]...`."""

    def change(content: dict) -> None:
        for key in keys[:-1]:
            content = content[key]
        del content[keys[-1]]

    return change


def first_weight(change: Callable[[torch.Tensor], object]) -> Change:
    """Return a change of the first weight of the model."""

    def changed(content: dict) -> None:
        name = next(name for name in content["state_dict"] if name.startswith("model."))
        content["state_dict"][name] = change(content["state_dict"][name])

    return changed


def every_group(change: Callable[[dict], object]) -> Change:
    return lambda content: [change(state) for state in content["optimizer_states"]]


EVERYWHERE: dict[str, Change] = {
    "hyper_parameters None": put(HP, None),
    "hyper_parameters list": put(HP, [1]),
    "state_dict None": put("state_dict", None),
    "state_dict list": put("state_dict", [1]),
    "state_dict holds an int": put("state_dict", "model.x", 3),
    "state_dict key is an int": put("state_dict", 3, torch.ones(1)),
    "state_dict missing": drop("state_dict"),
    "state_dict empty": put("state_dict", {}),
    "weight of another shape": first_weight(lambda weight: torch.zeros(7, 7)),
    "weight on no device": first_weight(lambda weight: weight.to("meta")),
    "weight sparse": first_weight(lambda weight: weight.to_sparse()),
    "weight complex": first_weight(lambda weight: weight.to(torch.complex64)),
}
OF_RESUME: dict[str, Change] = {
    **{f"loops {value!r}": put(LOOPS, value) for value in ({}, None, [])},
    "loops fit None": put(LOOPS, "fit_loop", None),
    "loops fit empty": put(LOOPS, "fit_loop", {}),
    "loops count text": put(LOOPS, "fit_loop", "epoch_loop.batch_progress", "total", "processed", "x"),
    "loops count negative": put(LOOPS, "fit_loop", "epoch_loop.batch_progress", "total", "processed", -3),
    "loops of no step": put(LOOPS, "fit_loop", "epoch_loop.batch_progress", "total", "processed", 0),
    **{f"optimizer_states {value!r}": put("optimizer_states", value) for value in ([], None, 3, [{}])},
    "optimizer without state": every_group(lambda state: state.update(state={})),
    "optimizer without groups": every_group(lambda state: state.update(param_groups=[])),
    "optimizer state of another shape": every_group(lambda state: state["state"][0].update(exp_avg=torch.ones(2, 5))),
    "optimizer state incomplete": every_group(lambda state: state["state"][0].pop("exp_avg_sq")),
    **{f"lr_schedulers {value!r}": put("lr_schedulers", value) for value in ([], None, 3, [{}])},
    "no version": drop("pytorch-lightning_version"),
    "version number": put("pytorch-lightning_version", 2),
    "version junk": put("pytorch-lightning_version", "junk"),
    "callbacks list": put("callbacks", [1]),
    "callbacks state number": lambda content: content["callbacks"].update(dict.fromkeys(content["callbacks"], 3)),
    "epoch text": put("epoch", "three"),
    **{f"global_step {value!r}": put("global_step", value) for value in ("three", -3, 10**12, None)},
    **{f"skipped_steps {value!r}": put("skipped_steps", value) for value in (3, [1, 2, 3], ["x", 0])},
}
OF_DATA: dict[str, Change] = {
    **{f"data {value!r}": lambda content, name, value=value: put(name, value)(content) for value in (None, [1])},
    "data missing": lambda content, name: drop(name)(content),
    "no consumed": lambda content, name: drop(name, "consumed")(content),
    **{
        f"consumed {value!r}": lambda content, name, value=value: put(name, "consumed", value)(content)
        for value in ("x", -4, 10**15)
    },
    "global_batch 0": lambda content, name: put(name, "global_batch", 0)(content),
}
OF_IMAGES: dict[str, Change] = {
    **{f"without {name}": drop(HP, name) for name in ("swap", "model_kwargs", "num_classes", "ema_decay")},
    **{f"model {value!r}": put(HP, "model", value) for value in (None, 3, ["x"])},
    "model_kwargs list": put(HP, "model_kwargs", [1]),
    "depth huge": put(HP, "model_kwargs", {"depth": 10**7}),
    "image_size huge": put(HP, "image_size", 100_000),
    "classes number": put("ImageDataModule", "classes", 5),
}
OF_TEXT: dict[str, Change] = {
    **{f"without {name}": drop(HP, name) for name in ("vocab_size", "context_length", "overrides")},
    "num_layers huge": put(HP, "overrides", {"num_layers": 10**7}),
    "vocab_size huge": put(HP, "vocab_size", 10**12),
    "tokenizer number": put("TokenDataModule", "tokenizer", 5),
}


def write(content: dict, change: Change, path: Path) -> Path:
    content = copy.deepcopy(content)
    change(content)
    torch.save(content, path)
    return path


class Made:
    """Short run, its arguments and its checkpoint."""

    def __init__(self, root: Path, run: Callable[..., None], arguments: list[str]) -> None:
        self.run, self.arguments = run, arguments
        run("fit", *arguments, f"--trainer.default_root_dir={root}", "--trainer.max_epochs=-1", "--trainer.max_steps=3")
        self.content = load_checkpoint(newest_checkpoint(root))

    def refused(self, capsys, command: str, option: str, path: Path, *more: str) -> str:
        arguments = [*self.arguments, f"--trainer.default_root_dir={path.parent / 'refused'}"]
        arguments = arguments if command in ("fit", "validate") else []
        return mistake(capsys, self.run, command, *arguments, f"{option}={path}", *more)


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Made:
    root = tmp_path_factory.mktemp("images")
    write_shard(root / "s-0.tar", numbered_samples(40))
    return Made(root / "runs", run_dcvision, small_dcvision(f"{root}/s-0.tar", root / "refused"))


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Made:
    root = tmp_path_factory.mktemp("text")
    corpus = numbered_corpus(root / "corpus", 41 * 24 + 1, 7 * 24 + 1)
    return Made(root / "runs", run_dclm, small_dclm(corpus, root / "refused"))


def check_refusal(made: Made, capsys, path: Path) -> None:
    error = made.refused(capsys, "fit", "--resume", path)
    assert path.name in error or "the checkpoint" in error
    assert not list((path.parent / "refused").rglob("*.*"))  # a rejected run leaves no files


@pytest.mark.parametrize("name", [*EVERYWHERE, *OF_RESUME])
def test_resume_rejects_malformed_checkpoint(images, tmp_path, capsys, name):
    check_refusal(images, capsys, write(images.content, (EVERYWHERE | OF_RESUME)[name], tmp_path / "bad.ckpt"))


@pytest.mark.long
@pytest.mark.parametrize("name", [*EVERYWHERE, *OF_RESUME])
def test_resume_of_text_rejects_malformed_checkpoint(text, tmp_path, capsys, name):
    check_refusal(text, capsys, write(text.content, (EVERYWHERE | OF_RESUME)[name], tmp_path / "bad.ckpt"))


@pytest.mark.parametrize("name", OF_DATA)
def test_resume_rejects_invalid_position_in_data(images, text, tmp_path, capsys, name):
    for made, key in ((images, "ImageDataModule"), (text, "TokenDataModule")):
        change = partial(OF_DATA[name], name=key)
        check_refusal(made, capsys, write(made.content, change, tmp_path / "bad.ckpt"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*EVERYWHERE, *OF_IMAGES])
def test_image_commands_reject_malformed_checkpoint(images, tmp_path, capsys, name):
    path = write(images.content, (EVERYWHERE | OF_IMAGES)[name], tmp_path / "bad.ckpt")
    images.refused(capsys, "export", "--checkpoint", path, f"--out={tmp_path / 'out'}")
    images.refused(capsys, "evaluate", "--checkpoint", path, "--images=digits", f"--out={tmp_path / 'out'}")
    images.refused(capsys, "fit", "--init", path)
    if name in EVERYWHERE:
        images.refused(capsys, "validate", "--checkpoint", path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*EVERYWHERE, *OF_TEXT])
def test_text_commands_reject_malformed_checkpoint(text, tmp_path, capsys, name):
    path = write(text.content, (EVERYWHERE | OF_TEXT)[name], tmp_path / "bad.ckpt")
    text.refused(capsys, "generate", "--checkpoint", path, "--prompt=a")
    text.refused(capsys, "export", "--checkpoint", path, f"--out={tmp_path / 'out'}")
    if name != "tokenizer number":
        text.refused(capsys, "fit", "--init", path)
    if name in EVERYWHERE:
        text.refused(capsys, "validate", "--checkpoint", path)


def test_resume_accepts_unchanged_checkpoint(images, text, tmp_path):
    for made in (images, text):
        path = write(made.content, lambda content: None, tmp_path / "good.ckpt")
        made.run("fit", *made.arguments, f"--resume={path}", f"--trainer.default_root_dir={tmp_path / 'a'}",
                 "--trainer.max_epochs=-1", "--trainer.max_steps=4")  # fmt: skip


def test_missing_optimizer_state_is_accepted_with_gradient_scaler(images, tmp_path):
    """A gradient scaler skips the first steps, because its initial factor is too large, and does not count them."""
    content = copy.deepcopy(images.content)
    content["optimizer_states"][0]["state"] = {}
    torch.save(content, tmp_path / "plain.ckpt")
    with pytest.raises(UserError, match="no optimizer state"):
        check_resumable(tmp_path / "plain.ckpt")
    content["MixedPrecision"] = torch.amp.GradScaler("cpu").state_dict()
    torch.save(content, tmp_path / "scaled.ckpt")
    assert check_resumable(tmp_path / "scaled.ckpt") == 3


def test_sharded_checkpoint_of_earlier_version_raises_error(tmp_path):
    (tmp_path / "last.ckpt").mkdir()
    (tmp_path / "last.ckpt/.metadata").write_bytes(b"")
    with pytest.raises(UserError, match="by an earlier version"):
        find_checkpoint(str(tmp_path / "last.ckpt"))
