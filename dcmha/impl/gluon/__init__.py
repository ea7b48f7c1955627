"""Composed attention for 16-bit dtypes in Gluon (Triton): heads are mixed by tensor cores, in operands that need no
change of layout, without shared memory or barriers. Library products lie between the kernels, as in `impl/triton`.

Read `layouts.py`, `mixing.py`, `steps.py`, `kernels.py` and `chunked.py` in this order. No call chooses this
implementation yet: it has been executed instruction by instruction, but not on a GPU.
"""
