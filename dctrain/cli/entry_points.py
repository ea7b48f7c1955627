"""Entry points of the installed programs: `--help` without the imports of a trainer, which take seconds."""

import os
import signal
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

HELP = "help.txt"  # in the package of each program
INTERRUPTED = 130  # exit status


def start(program: str) -> None:
    """Run a program with the arguments of the process.

    Args:
        program: The name of its package.
    """
    if sys.argv[1:] in (["-h"], ["--help"]):
        return print(help_path(program).read_text(), end="")
    before = signal.signal(signal.SIGINT, _end)
    main = import_module(f"{program}.cli").main
    signal.signal(signal.SIGINT, before)
    main()


def _end(signum: int, frame: object) -> None:
    """End at once: libraries turn a KeyboardInterrupt during their imports into other errors."""
    print("interrupted", file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)


def help_path(program: str) -> Path:
    """Find the help of a program, without importing its package."""
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
