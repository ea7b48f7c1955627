"""Names of a package that are imported when they are first used, because Lightning, which they need, takes seconds."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def lazy_exports(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Make the `__getattr__` and the `__dir__` of a package.

    Args:
        package: The package.
        names: Names, and for each the module within the package that defines it.
    """

    def find(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f".{names[name]}", package), name)

    return find, lambda: sorted({*vars(sys.modules[package]), *names})
