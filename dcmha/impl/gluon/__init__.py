"""Composed attention for 16-bit dtypes in Gluon (Triton): heads are mixed by tensor cores, in operands that need no
change of layout, without shared memory or barriers. Library products lie between the kernels, as in `impl/triton`.

Read `layouts.py`, `mixing.py`, `steps.py`, `kernels.py`, `call.py`, `forward.py` and `backward.py` in this order.
"""

from functools import cache

OLDEST, NEWEST = (3, 6), (3, 8)  # versions of Triton whose Gluon is the one that the kernels are written in


@cache
def why_unavailable() -> str | None:
    """Say why the kernels cannot be compiled with the installed Triton; None if they can."""
    import triton

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if not OLDEST <= version <= NEWEST:
        oldest, newest = (".".join(map(str, each)) for each in (OLDEST, NEWEST))
        return f"the kernels in Gluon need Triton {oldest} to {newest}, got {triton.__version__}"
    return None
