"""Helpers of the fault tests. A user's mistake must end with one line and exit status 2."""

from collections.abc import Callable
from pathlib import Path

import lightning  # noqa: F401  its logger keeps the stderr at import, which must outlive a test
import pytest

from tests.conftest import numbered_samples


def mistake(capsys: pytest.CaptureFixture, run: Callable[..., None], *args: str) -> str:
    """Run a command that must fail, and return its error line."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_info:
        run(*args)
    error = capsys.readouterr().err
    assert exit_info.value.code == 2, error
    (line,) = [line for line in error.splitlines() if line.startswith("error: ")]
    assert error.endswith(f"{line}\n") and "Traceback" not in error, error
    return line


def image_folder(root: Path) -> Path:
    """Write an image folder with two classes of two images each."""
    for label, sample in enumerate(numbered_samples(4)):
        folder = root / "ab"[label // 2]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{label}.png").write_bytes(sample["png"])
    return root
