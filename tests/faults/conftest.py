"""Shared fixtures."""

import pytest

from tests.dclm.commands import run, small
from tests.dclm.data.corpora import numbered_corpus


@pytest.fixture
def corpus(tmp_path):
    """Numbered corpus with 41 training sequences of 24 tokens."""
    return numbered_corpus(tmp_path / "corpus", 41 * 24 + 1, 7 * 24 + 1)


@pytest.fixture(scope="session")
def trained_lm(tmp_path_factory):
    """Folder of a short run of a byte-level language model."""
    root = tmp_path_factory.mktemp("trained")
    run("fit", *small(numbered_corpus(root / "corpus"), root), "--trainer.max_steps=3")
    return root / "t/version_0"
