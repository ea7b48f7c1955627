"""SIGTERM during an evaluation.

Lightning's SIGTERM handler would end an evaluation with status 0 and without a result, and waits for other ranks within
the handler, which can hang.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import lightning as L
from lightning.pytorch.callbacks import Callback


@contextmanager
def exits_on_sigterm() -> Iterator[None]:
    """Make SIGTERM end the process immediately with the signal's exit status, until `ExitOnSignal` takes over."""
    before = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class ExitOnSignal(Callback):
    """Replaces Lightning's SIGTERM handler when an evaluation starts."""

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Install the handler."""
        signal.signal(signal.SIGTERM, _end)

    on_test_start = on_predict_start = on_validation_start


def _end(signum: int, frame: object) -> None:
    print("stopped by SIGTERM; there is no result", file=sys.stderr, flush=True)
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
