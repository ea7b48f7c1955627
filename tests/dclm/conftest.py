"""Shared fixtures."""

import pytest

from .data.corpora import numbered_corpus


@pytest.fixture
def corpus(tmp_path):
    """Numbered corpus with 41 training sequences of 24 tokens."""
    return numbered_corpus(tmp_path / "corpus", 41 * 24 + 1, 7 * 24 + 1)
