"""Composed attention for 16-bit dtypes in Gluon (Triton).

Tensor cores mix the heads, on operands that need no layout conversion, shared memory or barriers. Library matrix
products run between the kernels, as in `impl/triton`.

Read `layouts.py`, `mixing.py`, `steps.py`, `kernels.py`, `call.py`, `forward.py` and `backward.py` in this order.
"""

from functools import cache

OLDEST, NEWEST = (3, 6), (3, 8)  # supported versions of Triton: Gluon's API changes between versions


@cache
def why_unavailable() -> str | None:
    """Return why the kernels cannot be compiled with the installed Triton; None if they can."""
    import triton

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if not OLDEST <= version <= NEWEST:
        oldest, newest = (".".join(map(str, each)) for each in (OLDEST, NEWEST))
        return f"the Gluon kernels need Triton {oldest} to {newest}, got {triton.__version__}"
    return None
