"""Builds the C++ library from `source/` with the local compiler on first use, and caches it.

There is one library per pair of ranks. It is linked without an OpenMP runtime and uses the one that torch has loaded,
so that there is a single thread pool.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path

from filelock import FileLock

from ...cache_dirs import cache_dir
from ..call import ComposeRanks

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("source")
FLAGS = ("-std=c++17", "-O2", "-march=native", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
COMPILERS = ("g++", "clang++", "c++")  # the first available one is used, unless CXX names one


class Unavailable(RuntimeError):
    """The library is not available; the message says why."""


def load(ranks: ComposeRanks) -> ctypes.CDLL:
    """Load the library for compositions of these ranks; compile it if necessary.

    Raises:
        Unavailable: If compiling or loading fails.
    """
    loaded = _load(ranks)
    if isinstance(loaded, str):
        raise Unavailable(loaded)
    return loaded


def why_unavailable(ranks: ComposeRanks) -> str | None:
    """Return why there is no library for these ranks; None if there is one."""
    loaded = _load(ranks)
    return loaded if isinstance(loaded, str) else None


@cache
def _load(ranks: ComposeRanks) -> ctypes.CDLL | str:
    """Load a library, or return why it is not available; cached per process."""
    try:
        library = _loaded(ranks)
    except Unavailable as error:
        return str(error)
    except (OSError, RuntimeError, ValueError) as error:  # from the cache folder or an invalid CXX
        return f"its library cannot be built or cached: {error}"
    library.count_blocks.restype = ctypes.c_int64
    library.count_blocks.argtypes = [ctypes.c_int64]
    library.composed_attention.argtypes = [ctypes.c_void_p, ctypes.c_int]
    return library


def _loaded(ranks: ComposeRanks) -> ctypes.CDLL:
    """Load a library; a damaged one is compiled again."""
    path = _compiled(ranks)
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        path.unlink(missing_ok=True)
        return ctypes.CDLL(str(_compiled(ranks)))


def _compiled(ranks: ComposeRanks) -> Path:
    """Return the path of the library, compiled if it is not cached; a lock prevents concurrent compilation."""
    command = [*_compiler(), *FLAGS, f"-DRANK_QUERY={ranks.query}", f"-DRANK_KEY={ranks.key or 0}"]
    command += [f"-DKEY_SIDE={int(ranks.key is not None)}"]
    folder = cache_dir() / "cpu"
    folder.mkdir(exist_ok=True)
    path = folder / f"attention-{_fingerprint(command)}.so"
    if not path.is_file():
        with FileLock(path.with_suffix(".lock")):
            if not path.is_file():
                _compile(command, path)
    return path


def _compiler() -> list[str]:
    """Return the C++ compiler, with options from CXX if set."""
    if named := shlex.split(os.environ.get("CXX", "")):
        if shutil.which(named[0]) is None:
            raise Unavailable(f"CXX={named[0]} was not found")
        return named
    found = next(filter(shutil.which, COMPILERS), None)
    if found is None:
        raise Unavailable(f"it needs a C++ compiler ({', '.join(COMPILERS)}, or CXX), and none was found")
    return [found]


def _fingerprint(command: list[str]) -> str:
    """Hash of all that a library depends on: source, command, compiler, and the processor selected by `native`."""
    digest = hashlib.sha256()
    for path in sorted(SOURCE.iterdir()):
        digest.update(path.read_bytes())
    version = subprocess.run([*_compiler(), "--version"], capture_output=True, text=True, errors="replace").stdout
    digest.update("\0".join([*command, version, _processor()]).encode())
    return digest.hexdigest()[:24]


def _processor() -> str:
    """Description of the processor's instruction set."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _compile(command: list[str], path: Path) -> None:
    """Compile to a temporary file, check that it loads, and move it into the cache."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        compiled, linked = Path(folder) / "attention.o", Path(folder) / "attention.so"
        linker = [*_compiler(), "-shared", *(("-undefined", "dynamic_lookup") if platform.system() == "Darwin" else ())]
        _run([*command, "-c", str(SOURCE / "attention.cpp"), "-o", str(compiled)])
        _run([*linker, str(compiled), "-o", str(linked)])
        try:
            ctypes.CDLL(str(linked))
        except OSError as error:
            raise Unavailable(f"the library built by {command[0]} cannot be loaded: {error}") from error
        os.replace(linked, path)
    logger.info("compiled composed attention for this processor in %.1f s: %s", time.monotonic() - start, path)


def _run(command: list[str]) -> None:
    """Run the compiler.

    Raises:
        Unavailable: If it fails, with the first error message.
    """
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.splitlines()
        raise Unavailable(f"{command[0]} cannot compile it: {errors[0] if errors else f'status {done.returncode}'}")
