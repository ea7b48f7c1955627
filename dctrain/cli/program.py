"""Running a program: one of its functions, or Lightning, which is imported only when needed."""

import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..errors import RunStopped, UserError, is_of_another_rank, reason
from ..utils.files import relative
from .named_configs import with_config_paths
from .subcommands import Program, run_subcommand

USER_ERRORS = (UserError, OSError, UnicodeDecodeError, MemoryError, torch.OutOfMemoryError)
OF_LIGHTNING, OF_LOGGERS = "lightning.", ("wandb.", "mlflow.")


def run_program(program: Program, args: list[str] | None) -> None:
    """Run a program: one of its functions, or a Lightning subcommand.

    User errors print one message and exit with status 2.

    Args:
        program: The program.
        args: Command-line arguments; those of the process if None.
    """
    args = sys.argv[1:] if args is None else args
    try:
        args = with_config_paths(args)
        with _logging_implementation():
            if args and args[0] in program.functions:
                run_subcommand(program.name, program.functions, args)
            else:
                from .run_lightning import run_trainer  # imports Lightning

                run_trainer(program, args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except RunStopped as stop:
        go_on = "nothing has been trained yet"
        if stop.checkpoint is not None and stop.checkpoint.exists():
            go_on = f"continue with --resume {relative(stop.checkpoint)}"
        print(f"{stop}; {go_on}")
    except Exception as error:
        if not _is_user_error(error):
            raise
        print(f"error: {reason(error)}", file=sys.stderr)
        sys.exit(2)


@contextmanager
def _logging_implementation() -> Iterator[None]:
    """Log the selected attention implementation and its compilation, in the first process only."""
    logger, handler = logging.getLogger("dcmha"), logging.StreamHandler()
    if all(os.environ.get(rank, "0") == "0" for rank in ("RANK", "LOCAL_RANK", "SLURM_PROCID")):
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _is_user_error(error: Exception) -> bool:
    """Whether an error is printed as one message: `UserError`, errors of files, disks and memory, the death of a loader
    worker or another rank, and Lightning's errors about its arguments.
    """
    is_of_others = str(error).startswith("DataLoader worker (pid") or is_of_another_rank(error)
    if isinstance(error, USER_ERRORS) or is_of_others or type(error).__module__.startswith((OF_LIGHTNING, *OF_LOGGERS)):
        return True
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    is_of_lightning = frame.f_globals.get("__name__", "").startswith(OF_LIGHTNING)
    return is_of_lightning and isinstance(error, ValueError | RuntimeError)
