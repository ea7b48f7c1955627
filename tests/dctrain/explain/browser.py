"""Helpers that open a page in Chromium (Debian package `chromium`)."""

import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
PHONE = (390, 844)


def opened(page: Path, state: str = "", script: str = "", size: tuple[int, int] = (1100, 900)) -> str:
    """Return the document after its scripts, and `script` at the end of its body, have run."""
    copy = page.with_name("opened.html")
    copy.write_text(page.read_text(encoding="utf-8").replace("</body>", f"<script>{script}</script></body>"), "utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--window-size={size[0]},{size[1]}", "--dump-dom"]
    options += ["--virtual-time-budget=2000", f"--user-data-dir={page.parent / 'browser'}"]
    done = subprocess.run([CHROMIUM, *options, f"file://{copy}#{state}"], capture_output=True, text=True, timeout=120)
    return done.stdout


def title(document: str) -> str:
    """Return the title of the document, which a script has set."""
    return unescape(re.search(r"<title>(.*?)</title>", document, re.DOTALL)[1])
