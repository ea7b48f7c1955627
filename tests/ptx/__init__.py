"""Executor of compiled kernels on CPU tensors, with checks that hardware does not perform.

It runs the PTX of kernels of one warp without shared memory or barriers, such as those of `dcmha/impl/gluon/`.

    run       executes PTX (`execute.py`)
    launch    compiles Gluon kernels and executes them instead of `dcmha.impl.gluon.launch.launch`
"""
