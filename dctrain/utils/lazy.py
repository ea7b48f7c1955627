"""Lazy exports of a package, because importing Lightning takes seconds."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def lazy_exports(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Create the `__getattr__` and `__dir__` of a package.

    Args:
        package: The package.
        names: Exported names with the modules of the package that define them.
    """

    def find(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f".{names[name]}", package), name)

    return find, lambda: sorted({*vars(sys.modules[package]), *names})
