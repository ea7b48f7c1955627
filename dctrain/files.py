"""Writing files that a crash leaves whole: the old one or the new one."""

import json
import os
from pathlib import Path


def write_json(path: Path, content: dict | list) -> None:
    """Write JSON in one step: beside its place, flushed to the disk, then renamed."""
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w") as file:
        file.write(json.dumps(content, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
