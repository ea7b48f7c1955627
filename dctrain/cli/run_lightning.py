"""Running a Lightning subcommand, `plan`, or the help of a program."""

import gc
import logging
import warnings
from collections.abc import Callable

import torch

from ..errors import UserError
from ..plan.command import PlanCLI
from .lightning_cli import TrainerCLI
from .subcommands import Program, format_help, import_function, summaries, summary_line

PLAN = "plan"


def run_lightning(make_cli: Callable[[], TrainerCLI]) -> None:
    """Run a Lightning subcommand and destroy its process groups."""
    for noise in (
        *(".*does not have many workers.*", ".*LightningCLI's args parameter.*", ".*LeafSpec.*"),
        ".*callbacks used to create the checkpoint need to be provided.*",
        ".*your dataloader is not resumable.*",  # it needs no state: its position follows from the steps
    ):
        warnings.filterwarnings("ignore", noise)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_is_no_advertisement)
    make_cli()
    if torch.distributed.is_initialized():
        gc.collect()  # sharded parameters reference process groups, whose threads must end before the interpreter
        torch.distributed.destroy_process_group()


def _is_no_advertisement(record: logging.LogRecord) -> bool:
    return "litlogger" not in record.getMessage()


def run_trainer(program: Program, args: list[str]) -> None:
    """Run a command that needs Lightning: one of its subcommands, `plan`, or the help of all subcommands.

    Args:
        program: The program.
        args: The arguments.

    Raises:
        UserError: If the subcommand is unknown, or its arguments are wrong.
    """
    cli = import_function(program.trainer)
    trained = {name: summary_line(getattr(cli, name)) for name in cli.subcommands()}
    trained[PLAN] = "Show the memory, time and cost of `fit` without training."
    if args in (["-h"], ["--help"]):
        commands = trained | summaries(program.functions)
        return print(format_help(program.name, program.description, commands), end="")
    _check_subcommand(program, [*trained, *program.functions], args)
    if args[0] == PLAN:
        return run_lightning(lambda: type(cli.__name__, (PlanCLI, cli), {})(["fit", *args[1:]]))
    run_lightning(lambda: cli(args))


def _check_subcommand(program: Program, names: list[str], args: list[str]) -> None:
    if not args:
        raise UserError(f"{program.name} requires a subcommand; expected {', '.join(names)}. See --help.")
    if not args[0].startswith("-") and args[0] not in names:
        raise UserError(f"{args[0]!r} is not a subcommand of {program.name}; expected {', '.join(names)}.")
