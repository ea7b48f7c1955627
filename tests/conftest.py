"""Shared fixtures: private cache, environment variables, threads, and small image shards.

Without a GPU, the fused kernels run in Triton's interpreter, which must be selected before Triton is imported. Image
libraries are imported inside functions, so that the tests of the operator run without these libraries.
"""

import io
import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """Redirect the user's cache to a temporary folder; all workers share compiled files."""
    cache, base = tmp_path_factory.mktemp("cache"), tmp_path_factory.getbasetemp()
    compiled = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled"
    compiled.mkdir(exist_ok=True)
    (cache / "dcmha").mkdir()
    (cache / "dcmha/cpu").symlink_to(compiled)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        patch.setenv("OMP_NUM_THREADS", "1")  # for subprocesses; `threads` sets the number of this process
        torch.set_num_threads(1)  # module fixtures run before `threads`
        yield


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Remove the variables of a process group in this process, because subprocesses would inherit them."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def encode(pixels, kind: str = "PNG") -> bytes:
    """Encode an array of uint8 pixels."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def write_shard(path: Path, samples: list[dict]) -> Path:
    from webdataset import TarWriter

    with TarWriter(str(path)) as writer:
        for sample in samples:
            writer.write(sample)
    return path


def numbered_samples(count: int, start: int = 0, num_classes: int = 10) -> list[dict]:
    """Return tiny images whose pixel values equal their number."""
    import numpy as np

    return [
        {
            "__key__": f"{i:04d}",
            "png": encode(np.full((8, 8, 3), i, dtype=np.uint8)),
            "cls": str(i % num_classes),
        }
        for i in range(start, start + count)
    ]


@pytest.fixture
def shards(tmp_path) -> str:
    """Brace pattern of five shards with 7, 9, 8, 10 and 6 numbered samples."""
    start = 0
    for number, count in enumerate((7, 9, 8, 10, 6)):
        write_shard(tmp_path / f"s-{number}.tar", numbered_samples(count, start))
        start += count
    return f"{tmp_path}/s-{{0..4}}.tar"


@pytest.fixture(autouse=True)
def threads():
    """Use one thread: the tests are small, and results must not depend on the split of a sum."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
