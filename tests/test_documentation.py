"""Documentation: the code runs, the links are valid, and the site builds."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.dctrain.commands import ROOT

README = (ROOT / "README.md").read_text()
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("*/README.md")),
]
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"")


def code_blocks(text: str, language: str) -> list[str]:
    """Return the fenced code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    """Return the lines of the shell code blocks, without comments."""
    lines = "\n".join(code_blocks(text, "bash")).splitlines()
    return [command for line in lines if (command := line.partition("  #")[0].strip())]


def headings(page: Path) -> set[str]:
    """Return the anchors of a page, as named by GitHub and MkDocs."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_readme_is_short():
    assert len(README.splitlines()) <= 166


def test_python_code_of_the_readme_runs():
    code = "\n".join(code_blocks(README, "python"))
    assert "DCAttention" in code and "swap_attention(model)" in code
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("command", commands(README))
def test_command_of_the_readme_runs(command):
    """Training only prints its configuration, `make` does a dry run, and the extras of `pip install` exist."""
    program, *rest = command.split()
    if program == "pip":
        extras = set(re.findall(r"\[(\w+)\]", command))
        assert extras <= tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
        assert all((ROOT / name).exists() for name in re.findall(r"\S+\.txt", command))
        return
    if program == "python":
        arguments = [sys.executable, *rest, *(["--print_config"] if "fit" in rest else [])]
    else:
        arguments = [program, "--dry-run", *rest]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout, result.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_refer_to_existing_files_and_headings(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in (a or b for a, b in LINK.findall(text)):
        if link.startswith(("http:", "https:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in headings(target), link


def test_code_is_fenced():
    for page in PAGES:
        text = page.read_text()
        assert text.count("\n```") % 2 == 0, page
        outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        assert not re.search(r"^\n {4}(?!- |\d)\S", outside, re.MULTILINE), page


@pytest.mark.slow
def test_site_builds(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    html = (tmp_path / "attention/index.html").read_text()
    assert "<math" in html and "EQUATION" not in html
    assert "DCAttention" in (tmp_path / "api/index.html").read_text()
    addresses = re.findall(r"(?:src|href)=\"(https?://[^\"]+)", (tmp_path / "index.html").read_text())
    assert all(re.match(r"https://(arxiv\.org|squidfunk\.github\.io)", address) for address in addresses), addresses
