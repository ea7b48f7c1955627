"""Subcommands that are plain functions: options are the function's parameters, the help is its docstring."""

import argparse
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple, NoReturn, get_args, get_origin

import yaml
from docstring_parser import parse
from jsonargparse import ActionConfigFile, ArgumentParser

from ..errors import UserError, as_user_error

EXTRA = "extra"  # parameter that receives the arguments after --
CONFIG = "config"
SAID = ("true", "false")
MAY_BE_EMPTY = ("prompt", "text", "stop", "target", "prefix", EXTRA)  # free text, not names or paths

Functions = Mapping[str, "str | Functions"]  # "module:function", or a mapping for subcommands of two words


class Program(NamedTuple):
    """A program.

    Attributes:
        name: Name of the program.
        description: One-sentence description.
        functions: Subcommands that are functions.
        trainer: Its `TrainerCLI` for Lightning's subcommands, as "module:name".
    """

    name: str
    description: str
    functions: Functions
    trainer: str


class UserErrorParser:
    """Parser mixin that raises errors as one message, without the usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise the parser's error, or the `UserError` that caused it."""
        while ex is not None and not isinstance(ex, UserError):
            ex = ex.__cause__ or ex.__context__
        raise UserError(message) if ex is None else ex


class FunctionParser(UserErrorParser, ArgumentParser):
    """Parser for the arguments of a function."""


class Once(argparse.Action):
    """Action of an option that may be given once; argparse would ignore all but the last."""

    is_given = False

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        """Store the values, unless the option was given before."""
        if self.is_given:
            raise UserError(f"{option_string} is given twice; give all values after one option.")
        self.is_given = True
        setattr(namespace, self.dest, values)


def run_subcommand(program: str, functions: Functions, args: list[str]) -> None:
    """Call the function selected by the first word of the arguments, or by the first two.

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
        got = f"{program} {name} requires a second word" if not rest else f"{rest[0]!r} is unknown to {program} {name}"
        raise UserError(f"{got}; expected {', '.join(named)}.")
    return run_subcommand(f"{program} {name}", named, rest)


def run_function(program: str, name: str, function: Callable[..., None], args: list[str]) -> None:
    """Call a function with command-line arguments: `PROGRAM NAME --parameter value ...`.

    `--config FILE` reads arguments from YAML, unless the function has a parameter of this name; later arguments on the
    command line take precedence.

    A sequence parameter takes several values, each as plain text; a boolean one may be given without "true". A
    parameter named `extra` receives the arguments after `--`.

    Raises:
        UserError: If the arguments are invalid, or a file cannot be read or written.
    """
    parser = FunctionParser(prog=f"{program} {name}", description=summary_line(function), allow_abbrev=False)
    parameters = inspect.signature(function).parameters
    sequences = [key for key, parameter in parameters.items() if _item_type(parameter.annotation)]
    extra = []
    if EXTRA in parameters and "--" in args:
        at = args.index("--")
        args, extra = args[:at], args[at + 1 :]
    if CONFIG not in parameters:
        parser.add_argument(f"--{CONFIG}", action=ActionConfigFile, help="YAML file with these arguments.")
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
    if CONFIG not in parameters:
        _check_sequences(args, sequences)
    switches = {f"--{key}" for key, parameter in parameters.items() if parameter.annotation is bool}
    with as_user_error("the arguments cannot be read", (RuntimeError, TypeError, AttributeError)):  # malformed YAML
        options = parser.parse_args(_completed(args, switches)).as_dict()
    check_not_empty({name: value for name, value in options.items() if name not in MAY_BE_EMPTY})
    if CONFIG not in parameters:
        del options[CONFIG]
    function(**options, **({EXTRA: extra} if EXTRA in parameters else {}))


def check_not_empty(options: Mapping[str, object]) -> None:
    """Check that names and paths are not empty: an empty path would be the working directory.

    Args:
        options: Options by name; values may be lists.

    Raises:
        UserError: If a value is empty.
    """
    for name, value in options.items():
        if value == "" or (isinstance(value, Sequence) and "" in list(value)):
            raise UserError(f"{name}='': expected a name or a path (an unset shell variable is empty).")


def _check_sequences(args: list[str], names: Sequence[str]) -> None:
    """Check that configuration files contain lists for parameters with several values.

    Raises:
        UserError: If one is not a list.
    """
    for before, arg in zip(["", *args], args, strict=False):
        option, _, value = arg.partition("=")
        path = Path(arg if before == f"--{CONFIG}" else value if option == f"--{CONFIG}" else "")
        content = None
        if path.is_file():
            with suppress(yaml.YAMLError, UnicodeDecodeError):  # the parser reports the position
                content = yaml.safe_load(path.read_text())
        for name in names if isinstance(content, dict) else ():
            if not isinstance(content.get(name, []), list):
                raise UserError(f"{name}={content[name]!r}: expected a list.")


def _completed(args: list[str], switches: set[str]) -> list[str]:
    """Add "true" after boolean options without a value."""
    completed = []
    for arg, after in zip_longest(args, args[1:], fillvalue=""):
        completed += [arg, "true"] if arg in switches and after.lower() not in SAID else [arg]
    return completed


def _item_type(annotation) -> type | None:
    """Return the item type of a sequence annotation; None for other types."""
    return get_args(annotation)[0] if get_origin(annotation) is Sequence else None


def _parameter_docs(function: Callable[..., None]) -> dict[str, str]:
    """Return the descriptions of a function's parameters from its docstring."""
    return {parameter.arg_name: parameter.description for parameter in parse(inspect.getdoc(function)).params}


def import_function(name: str) -> Callable:
    """Import a function given as "module:name"."""
    module, _, found = name.partition(":")
    return getattr(import_module(module), found)


def summaries(functions: Functions) -> dict[str, str]:
    """Return the first docstring line of each function, or the names of a group of functions."""
    return {
        name: ", ".join(function) if isinstance(function, Mapping) else summary_line(import_function(function))
        for name, function in functions.items()
    }


def summary_line(function: Callable) -> str:
    """Return the first line of a docstring."""
    return inspect.getdoc(function).splitlines()[0]


def format_help(program: str, description: str, commands: Mapping[str, str]) -> str:
    """Format the help of a program with all its subcommands.

    Args:
        program: Name of the program.
        description: Its description.
        commands: One-line descriptions of the subcommands.
    """
    parser = argparse.ArgumentParser(prog=program, description=description, epilog="Each subcommand has --help.")
    listed = parser.add_subparsers(title="Available subcommands", metavar="SUBCOMMAND")
    for name, message in commands.items():
        listed.add_parser(name, help=message.replace("%", "%%"))
    return parser.format_help()
