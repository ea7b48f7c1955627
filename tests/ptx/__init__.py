"""An executor of compiled kernels on CPU tensors, with checks that hardware does not make.

It runs the PTX of kernels of one warp without shared memory or barriers: those of `dcmha/impl/gluon/`.

    run       executes PTX (`execute.py`)
    launch    compiles Gluon kernels, and executes them in place of `dcmha.impl.gluon.launch.launch`
"""
