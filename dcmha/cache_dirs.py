"""Location of the cache of derived files."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return the cache folder, `$XDG_CACHE_HOME/dcmha` or `~/.cache/dcmha`; created if missing."""
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dcmha"
    path.mkdir(parents=True, exist_ok=True)
    return path
