"""Private names of Lightning are used in one file only and exist in the accepted versions."""

import ast
import inspect
import tomllib
from importlib.metadata import version
from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from packaging.requirements import Requirement
from torch import nn

ROOT = Path(__file__).parents[2]
INTERNALS = ROOT / "dctrain/lightning_internals.py"
KNOWN_TO_WORK = ">=2.6.6,<2.7"
OVERRIDDEN = {
    L.Trainer: ["_run"],
    ModelCheckpoint: ["_save_topk_checkpoint"],
    LightningCLI: ["_prepare_subcommand_parser", "_set_seed", "_run_subcommand", "_parse_ckpt_path", "_parser"],
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def attributes(tree: ast.AST) -> list[ast.Attribute]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_private(node.attr)]


def own_names(tree: ast.AST) -> set[str]:
    """Return the names that a file defines: functions, classes, and private attributes that it sets."""
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    stored = {node.attr for node in attributes(tree) if isinstance(node.ctx, ast.Store)}
    return defined | stored


def private_names_of_lightning() -> set[str]:
    """Return the private names of the Lightning objects that the trainers use."""
    trainer = L.Trainer(logger=False, enable_checkpointing=False, barebones=True)
    loop = trainer.fit_loop
    objects = [trainer, loop, loop.epoch_loop, loop.epoch_loop.val_loop, trainer._logger_connector, trainer.strategy]
    objects += [trainer._accelerator_connector, ModelCheckpoint(), L.LightningModule(), LightningCLI, WandbLogger]
    names = {name for one in objects for name in (*dir(one), *getattr(one, "__dict__", ()))}
    return {name for name in names if is_private(name)} - set(dir(nn.Module()))


def test_private_names_are_used_in_one_file_only():
    names, found = private_names_of_lightning(), {}
    assert {"_logger_connector", "_batches_that_stepped", "_should_check_val_fx", "_trainer", "_set_seed"} <= names
    files = [path for package in ("dctrain", "dcvision", "dclm", "dcvl") for path in (ROOT / package).rglob("*.py")]
    for path in files:
        text = path.read_text()
        if path == INTERNALS or "lightning" not in text:
            continue
        tree = ast.parse(text)
        used = {node.attr for node in attributes(tree)} & names - own_names(tree)
        overridden = {
            node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and any(node.name in of_class for of_class in OVERRIDDEN.values())
        }
        found |= {path.relative_to(ROOT): used | overridden} if used | overridden else {}
    assert found == {}


def test_accepted_versions_equal_tested_versions():
    """Raise both versions together, after running the tests with the new version."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    accepted = next(one for one in map(Requirement, extras["train"]) if one.name == "lightning")
    assert accepted.specifier == Requirement(f"lightning{KNOWN_TO_WORK}").specifier
    assert accepted.specifier.contains(version("lightning"))


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in OVERRIDDEN.items() for name in names])
def test_overridden_methods_exist(kind, name):
    assert callable(getattr(kind, name))


def test_private_attributes_exist(tmp_path):
    trainer = L.Trainer(logger=False, enable_checkpointing=False, barebones=True)
    loop = trainer.fit_loop
    assert loop.epoch_loop._batches_that_stepped == 0
    assert "data_fetcher" in inspect.signature(loop.epoch_loop._should_check_val_fx).parameters
    assert loop._data_fetcher is None
    assert trainer._logger_connector._first_loop_iter is None
    assert callable(trainer._logger_connector.update_train_step_metrics)
    assert trainer._accelerator_connector.use_distributed_sampler is True
    assert L.LightningModule()._trainer is None
    assert TensorBoardLogger(tmp_path, purge_step=7)._kwargs == {"purge_step": 7}
    assert WandbLogger(save_dir=tmp_path, offline=True)._experiment is None
