"""Fixtures: a working directory with a composed and a plain model."""

import shutil

import pytest

from ..evaluation.models import small_folder


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    small_folder(folder / "model"), small_folder(folder / "plain", 1, name="transformer_pp_debug")
    return folder


@pytest.fixture
def here(models, tmp_path, monkeypatch):
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path
