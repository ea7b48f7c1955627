"""Entry points of the installed programs. `--help` does not import the trainers, which takes seconds."""

import os
import signal
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

HELP = "help.txt"  # file in each program's package
INTERRUPTED = 130  # exit status


def start(program: str) -> None:
    """Run a program with the command-line arguments of the process.

    Args:
        program: Name of its package.
    """
    if sys.argv[1:] in (["-h"], ["--help"]):
        return print(help_path(program).read_text(), end="")
    before = signal.signal(signal.SIGINT, _end)
    main = import_module(f"{program}.cli").main
    signal.signal(signal.SIGINT, before)
    main()


def _end(signum: int, frame: object) -> None:
    """Exit immediately, because libraries convert a KeyboardInterrupt during import to other errors."""
    print("interrupted", file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)


def help_path(program: str) -> Path:
    """Return the path of a program's help text without importing its package."""
    return Path(find_spec(program).origin).with_name(HELP)


def dcvision() -> None:
    """Run `dcvision`."""
    start("dcvision")


def dclm() -> None:
    """Run `dclm`."""
    start("dclm")


def dcvl() -> None:
    """Run `dcvl`."""
    start("dcvl")
