"""Subcommands that are functions: arguments are the function's own, their help its docstring."""

import argparse
import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from itertools import zip_longest
from typing import NamedTuple, NoReturn, get_args, get_origin

from docstring_parser import parse
from jsonargparse import ActionConfigFile, ArgumentParser

from ..errors import UserError, as_user_error

EXTRA = "extra"  # the parameter that takes what stands after --
CONFIG = "config"
SAID = ("true", "false")
MAY_BE_EMPTY = ("prompt", "text", "stop", "target", "prefix", EXTRA)  # texts, not names or paths

Functions = Mapping[str, "str | Functions"]  # each as "module:function"; of mappings, the second word says which


class Program(NamedTuple):
    """A program.

    Attributes:
        name: What it is called.
        description: What it is for.
        functions: Its subcommands that are functions.
        trainer: Its `TrainerCLI`, for the subcommands of Lightning, as "module:name".
    """

    name: str
    description: str
    functions: Functions
    trainer: str


class UserErrorParser:
    """A parser whose errors are one message, without the usage before it."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise what the command line prints: of what the parser says of a `UserError`, that alone."""
        while ex is not None and not isinstance(ex, UserError):
            ex = ex.__cause__ or ex.__context__
        raise UserError(message) if ex is None else ex


class FunctionParser(UserErrorParser, ArgumentParser):
    """Parses the arguments of a function."""


class Once(argparse.Action):
    """Takes the values of an option that may stand once; of two argparse would drop the first."""

    is_given = False

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        """Keep the values, unless the option has stood before."""
        if self.is_given:
            raise UserError(f"{option_string} is given twice; give its values one after the other.")
        self.is_given = True
        setattr(namespace, self.dest, values)


def run_subcommand(program: str, functions: Functions, args: list[str]) -> None:
    """Call the function that the first word of the arguments names, or the first two.

    Raises:
        UserError: As `run_function`, or if a second word is missing or unknown.
    """
    name, *rest = args
    named = functions[name]
    if not isinstance(named, Mapping):
        return run_function(program, name, import_function(named), rest)
    if rest and rest[0] in ("-h", "--help"):
        return print(format_help(f"{program} {name}", "", summaries(named)), end="")
    if not rest or rest[0] not in named:
        got = f"{program} {name} needs a second word" if not rest else f"{rest[0]!r} is none of {program} {name}"
        raise UserError(f"{got}; expected {', '.join(named)}.")
    return run_subcommand(f"{program} {name}", named, rest)


def run_function(program: str, name: str, function: Callable[..., None], args: list[str]) -> None:
    """Call a function with arguments of the command line: `PROGRAM NAME --parameter value ...`.

    `--config FILE` reads arguments from YAML, unless it is a parameter of the function itself; what stands after it on
    the command line counts more.

    A parameter that is a sequence takes its values one after the other, each as plain text; one that is a switch may
    stand without "true". One called `extra` takes what stands after `--`.

    Raises:
        UserError: If the arguments do not fit, or a file cannot be read or written.
    """
    parser = FunctionParser(prog=f"{program} {name}", description=summary_line(function), allow_abbrev=False)
    parameters = inspect.signature(function).parameters
    sequences = [key for key, parameter in parameters.items() if _item_type(parameter.annotation)]
    extra = []
    if EXTRA in parameters and "--" in args:
        at = args.index("--")
        args, extra = args[:at], args[at + 1 :]
    if CONFIG not in parameters:
        parser.add_argument(f"--{CONFIG}", action=ActionConfigFile, help="A YAML file of these arguments.")
    parser.add_function_arguments(function, as_group=False, skip=set(sequences))
    helps = _parameter_docs(function)
    for key in (key for key in sequences if key != EXTRA):
        default = parameters[key].default
        is_required = default is inspect.Parameter.empty
        parser.add_argument(
            f"--{key}",
            action=Once,
            nargs="+",
            type=_item_type(parameters[key].annotation),
            required=is_required,
            default=None if is_required else list(default),
            help=helps[key],
        )
    switches = {f"--{key}" for key, parameter in parameters.items() if parameter.annotation is bool}
    with as_user_error("the arguments cannot be read", (RuntimeError, TypeError, AttributeError)):  # of malformed YAML
        options = parser.parse_args(_completed(args, switches)).as_dict()
    for key in (key for key in sequences if key != EXTRA):
        if not isinstance(options[key], list):
            raise UserError(f"{key}={options[key]!r}: expected a list.")
    check_not_empty({name: value for name, value in options.items() if name not in MAY_BE_EMPTY})
    if CONFIG not in parameters:
        del options[CONFIG]
    function(**options, **({EXTRA: extra} if EXTRA in parameters else {}))


def check_not_empty(options: Mapping[str, object]) -> None:
    """Refuse empty names and paths: an empty path would be the working directory.

    Args:
        options: Names of options and their values; lists of values too.

    Raises:
        UserError: If a value is empty.
    """
    for name, value in options.items():
        if value == "" or (isinstance(value, Sequence) and "" in list(value)):
            raise UserError(f"{name}='': expected a name or a path; an unset variable of a shell is empty.")


def _completed(args: list[str], switches: set[str]) -> list[str]:
    """Add the "true" that a switch alone means."""
    completed = []
    for arg, after in zip_longest(args, args[1:], fillvalue=""):
        completed += [arg, "true"] if arg in switches and after.lower() not in SAID else [arg]
    return completed


def _item_type(annotation) -> type | None:
    """Return what a sequence holds; None for other types."""
    return get_args(annotation)[0] if get_origin(annotation) is Sequence else None


def _parameter_docs(function: Callable[..., None]) -> dict[str, str]:
    """Read what a docstring says of each parameter."""
    return {parameter.arg_name: parameter.description for parameter in parse(inspect.getdoc(function)).params}


def import_function(name: str) -> Callable:
    """Import what is written as "module:name"."""
    module, _, found = name.partition(":")
    return getattr(import_module(module), found)


def summaries(functions: Functions) -> dict[str, str]:
    """Take of each function the first line of its docstring; of a group of functions their names."""
    return {
        name: ", ".join(function) if isinstance(function, Mapping) else summary_line(import_function(function))
        for name, function in functions.items()
    }


def summary_line(function: Callable) -> str:
    """Return the first line of a docstring."""
    return inspect.getdoc(function).splitlines()[0]


def format_help(program: str, description: str, commands: Mapping[str, str]) -> str:
    """Write the help of a program that lists all its subcommands.

    Args:
        program: Its name.
        description: What it is for.
        commands: What each subcommand does, in a line.
    """
    parser = argparse.ArgumentParser(prog=program, description=description, epilog="Each subcommand has --help.")
    listed = parser.add_subparsers(title="Available subcommands", metavar="SUBCOMMAND")
    for name, said in commands.items():
        listed.add_parser(name, help=said.replace("%", "%%"))
    return parser.format_help()
