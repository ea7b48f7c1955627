"""The built-in corpus: the Python sources of the running interpreter's standard library, as bytes."""

import os
import platform
import sysconfig
import tempfile
from pathlib import Path

from dcmha.cache_dirs import cache_dir

from .corpus_options import CorpusOptions
from .make_tokens import prepare

NOT_THE_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}


def stdlib_sources() -> list[Path]:
    """Return the files, sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    return sorted(p for p in root.rglob("*.py") if p.is_file() and not NOT_THE_LIBRARY & set(p.parts))


def stdlib_corpus() -> Path:
    """Return the folder of the prepared corpus, about 30 million tokens; prepared on first use."""
    version = platform.python_version()
    folder = cache_dir() / f"stdlib-{version}-v1"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            prepare(stdlib_sources(), Path(made) / "corpus", CorpusOptions(val_fraction=0.02))
            try:
                os.rename(Path(made) / "corpus", folder)
            except OSError:
                if not folder.is_dir():  # else another process has prepared it
                    raise
    return folder
