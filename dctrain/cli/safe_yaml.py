"""Rejecting YAML files whose content expands without bound, and malformed configurations."""

from pathlib import Path

import yaml

from ..errors import UserError

GROUPS = ("model", "data", "trainer")
MAX_BYTES, MAX_NODES, MAX_DEPTH, MAX_DIGITS = 2**20, 100_000, 100, 300


def check_yaml_file(path: Path) -> None:
    """Check that a YAML file is safe for parsers that expand aliases.

    Raises:
        UserError: If it is too large, too deep, refers to itself, or expands without bound by aliases.
    """
    if path.stat().st_size > MAX_BYTES:
        raise UserError(f"{path} has {path.stat().st_size:,} bytes; expected a configuration of at most {MAX_BYTES:,}.")
    try:
        root = yaml.compose(path.read_bytes(), Loader=yaml.SafeLoader)
    except RecursionError as error:
        raise UserError(f"{path} is nested too deeply; expected at most {MAX_DEPTH} levels.") from error
    except yaml.YAMLError:
        return  # the parser reports the position
    if root is not None:
        _count(root, path, {}, 0)
        _check_groups(root, path)


def _check_groups(root: yaml.Node, path: Path) -> None:
    """Check that groups of settings are mappings; the parser would ignore others.

    Raises:
        UserError: If there is one.
    """
    for key, value in root.value if isinstance(root, yaml.MappingNode) else ():
        is_null = isinstance(value, yaml.ScalarNode) and value.tag == "tag:yaml.org,2002:null"
        if key.value in GROUPS and not isinstance(value, yaml.MappingNode) and not is_null:
            raise UserError(f"{path}: {key.value} must be a mapping of settings.")


def _check_keys(node: yaml.MappingNode, path: Path) -> None:
    """Check that keys are unique; the parser would ignore all but the last.

    Raises:
        UserError: If there is one.
    """
    keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise UserError(f"{path}, line {node.start_mark.line + 1}: {twice!r} is given twice.")


def _count(node: yaml.Node, path: Path, known: dict[int, int], depth: int) -> int:
    """Count the nodes of a subtree, with aliases expanded.

    Raises:
        UserError: As `check_yaml_file`.
    """
    if id(node) in known:
        return known[id(node)]
    if depth > MAX_DEPTH:  # a node that refers to itself
        raise UserError(f"{path} is nested too deeply; expected at most {MAX_DEPTH} levels.")
    if isinstance(node, yaml.ScalarNode):
        is_number = node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
        if is_number and len(node.value) > MAX_DIGITS:
            raise UserError(f"{path} has a number of {len(node.value)} digits; expected at most {MAX_DIGITS}.")
        return 1
    if isinstance(node, yaml.MappingNode):
        _check_keys(node, path)
    parts = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
    total = 1
    for part in parts:
        total += _count(part, path, known, depth + 1)
        if total > MAX_NODES:
            raise UserError(f"{path} has more than {MAX_NODES:,} values after expanding aliases; expected fewer.")
    known[id(node)] = total
    return total
