"""Watchdog for the start of a distributed run: waiting processes print a message, and exit after a time limit."""

import os
import sys
import threading
import time
from collections.abc import Callable

import lightning as L
from lightning.fabric.plugins.environments import LightningEnvironment
from torch.distributed import is_initialized

LAUNCHER = "DCTRAIN_LAUNCHER"  # process id of the process that starts the others on its machine
NOTICE_SECONDS, LIMIT_SECONDS, INTERVAL = 60.0, 900.0, 0.5


def mark_launcher() -> None:
    """Store this process's id in the environment of processes that Lightning starts, unless it is one of them."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        os.environ[LAUNCHER] = str(os.getpid())


def watch_start(trainer: L.Trainer) -> None:
    """Watch in a thread until the processes of a run are connected.

    The process ends with status 2 and a message if the process that started it has died, or after `LIMIT_SECONDS`.

    Args:
        trainer: Trainer whose process group is not set up yet.
    """
    if trainer.world_size == 1 or is_initialized():
        return
    environment = getattr(trainer.strategy, "cluster_environment", None)
    launcher = None
    if isinstance(environment, LightningEnvironment) and environment.local_rank() > 0:
        launcher = int(os.environ.get(LAUNCHER, 0)) or None
    name = f"rank {trainer.global_rank} of {trainer.world_size}"
    arguments = (name, launcher, is_initialized, _say, _end)
    threading.Thread(target=watch, args=arguments, daemon=True, name="rendezvous").start()


def watch(
    name: str,
    launcher: int | None,
    is_ready: Callable[[], bool],
    say: Callable[[str], None],
    end: Callable[[str], None],
    *,
    notice_seconds: float = NOTICE_SECONDS,
    limit_seconds: float = LIMIT_SECONDS,
    interval: float = INTERVAL,
) -> None:
    """Wait until a process group is ready.

    Args:
        name: Name of this process in messages.
        launcher: Process id of the process that started this one; None to not watch it.
        is_ready: Returns whether the process group is ready.
        say: Prints a message.
        end: Ends the process with a message.
        notice_seconds: Time after which the message that the process is waiting is printed.
        limit_seconds: Time after which the process ends.
        interval: Seconds between checks.
    """
    start, is_said = time.monotonic(), False
    while not is_ready():
        waited = time.monotonic() - start
        if launcher is not None and os.getppid() != launcher:
            return end(f"{name}: the process that started it died before all processes of the run had started.")
        if waited > limit_seconds:
            return end(f"{name}: the other processes of the run have not started within {limit_seconds:.0f} s.")
        if waited > notice_seconds and not is_said:
            say(f"{name} is waiting for the other processes of the run (at most {limit_seconds:.0f} s)")
            is_said = True
        time.sleep(interval)


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _end(message: str) -> None:
    _say(f"error: {message}")
    os._exit(2)  # the main thread is blocked in the start of the process group
