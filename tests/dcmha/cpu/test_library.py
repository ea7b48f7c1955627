"""The compiled library: the first process compiles it once; another implementation runs if it is unavailable."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dcmha import DCAttention, resolve_impl
from dcmha.impl.call import ComposeRanks
from dcmha.impl.cpu import library

Q = torch.empty(1, 2, 3, 4)
ATTEND = """
import logging, torch
logging.basicConfig(level=logging.INFO, format="%(message)s")
from dcmha import DCAttention
layer = DCAttention(32, 4, rank=1)
layer(torch.randn(1, 5, 32)).sum().backward()
print(layer.resolved_impl)
"""


@pytest.fixture(autouse=True)
def anew(tmp_path, monkeypatch):
    """Forget the loaded libraries of this process and use an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library._load.cache_clear()
    yield
    library._load.cache_clear()


def attend(**environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", ATTEND],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.slow
def test_concurrent_processes_compile_once(tmp_path):
    processes = [attend() for _ in range(3)]
    told = [process.communicate(timeout=120) for process in processes]
    assert [out.strip() for out, _ in told] == ["cpu"] * 3, told
    assert sum(error.count("compiled composed attention for this processor in") for _, error in told) == 1
    kept = sorted(path.suffix for path in (tmp_path / "cache/dcmha/cpu").iterdir())
    assert kept in ([".so"], [".lock", ".so"])  # some systems leave the lock, which is an empty file


def test_missing_compiler_falls_back_to_compiled(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    choice = resolve_impl("auto", Q, is_composed=True)
    assert choice.impl == "compiled"
    assert (
        choice.reason
        == "'cpu' does not support the call: it needs a C++ compiler (g++, clang++, c++, or CXX), and none was found"
    )
    layer = DCAttention(32, 4)
    layer(torch.randn(1, 5, 32)).sum().backward()
    assert layer.resolved_impl == "compiled"
    with pytest.raises(ValueError, match="impl='cpu' cannot run: it needs a C"):
        DCAttention(32, 4, impl="cpu")(torch.randn(1, 5, 32))


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("exit 3", "cannot compile it: status 3"),
        (
            "[ $1 = --version ] || { echo 'x.cpp:1: error: no such thing' >&2; exit 1; }",
            "x.cpp:1: error: no such thing",
        ),
        (
            "[ $1 = --version ] || { echo 'fatal error: No space left on device' >&2; exit 1; }",
            "No space left on device",
        ),
        ('for last; do :; done; [ $1 = --version ] || echo junk > "$last"', "cannot be loaded: "),
    ],
)
def test_compiler_failure_is_reported_as_reason(tmp_path, monkeypatch, compiler, reason):
    monkeypatch.setenv("CXX", program(tmp_path / "c++", compiler))
    choice = resolve_impl("auto", Q, is_composed=True)
    assert choice.impl == "compiled" and reason in choice.reason
    assert not [path for path in (tmp_path / "cache/dcmha/cpu").iterdir() if path.suffix != ".lock"]


def test_invalid_cxx_is_reported_as_reason(monkeypatch):
    for name, reason in (("no-such-compiler -O2", "CXX=no-such-compiler was not found"), ("g++ 'x", "No closing quot")):
        library._load.cache_clear()
        monkeypatch.setenv("CXX", name)
        assert reason in resolve_impl("auto", Q, is_composed=True).reason


def test_unwritable_cache_is_reported_as_reason(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "its library cannot be built or cached" in resolve_impl("auto", Q, is_composed=True).reason


def test_missing_home_directory_is_reported_as_reason(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(
        Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("Could not determine home directory."))
    )
    assert "Could not determine home directory." in resolve_impl("auto", Q, is_composed=True).reason


def test_fingerprint_depends_on_source_command_compiler_and_processor(tmp_path, monkeypatch):
    names = {library._fingerprint(["g++"]), library._fingerprint(["g++", "-DRANK_QUERY=1"])}
    monkeypatch.setattr(library, "_processor", lambda: "another")
    names.add(library._fingerprint(["g++"]))
    monkeypatch.setenv("CXX", program(tmp_path / "c++", "echo another version"))
    names.add(library._fingerprint(["g++"]))
    monkeypatch.setattr(library, "SOURCE", tmp_path)
    names.add(library._fingerprint(["g++"]))
    assert len(names) == 5


@pytest.mark.slow
def test_each_pair_of_ranks_has_a_library_and_damaged_libraries_are_recompiled(tmp_path):
    kept = []
    for ranks in (ComposeRanks(1, None), ComposeRanks(0, 0), ComposeRanks(0, 0)):
        assert library.why_unavailable(ranks) is None
        kept = sorted((tmp_path / "cache/dcmha/cpu").glob("*.so"))
        library._load.cache_clear()
        for path in kept:
            path.unlink()  # the library may be in use: replace the file
            path.write_bytes(b"junk")
    assert len(kept) == 2
