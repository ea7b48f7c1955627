"""What every drill uses: a mistake ends in one line and exit status 2."""

from collections.abc import Callable
from pathlib import Path

import lightning  # noqa: F401  its log is written to what stderr is at the import, which must outlive a test
import pytest

from tests.conftest import numbered_samples


def mistake(capsys: pytest.CaptureFixture, run: Callable[..., None], *args: str) -> str:
    """Run a command line that must fail, and return the one line it says."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_info:
        run(*args)
    error = capsys.readouterr().err
    assert exit_info.value.code == 2, error
    (line,) = [line for line in error.splitlines() if line.startswith("error: ")]
    assert error.endswith(f"{line}\n") and "Traceback" not in error, error
    return line


def image_folder(root: Path) -> Path:
    """Two classes of two images each."""
    for label, sample in enumerate(numbered_samples(4)):
        folder = root / "ab"[label // 2]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{label}.png").write_bytes(sample["png"])
    return root
