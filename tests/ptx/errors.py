"""Errors of kernels, each raised at the first instruction that shows it."""


class PTXError(Exception):
    """Base of the others; the message names the kernel, the program, and the instruction with its source line."""


class UnsupportedError(PTXError):
    """An instruction, or a kind of kernel, that is not implemented."""


class UninitialisedError(PTXError):
    """A register is read that was never written."""


class DivergenceError(PTXError):
    """Lanes of a warp branch differently."""


class OutOfBoundsError(PTXError):
    """An access outside of the tensors that were passed."""


class MisalignedError(PTXError):
    """An address that is not a multiple of the access's size."""


class RaceError(PTXError):
    """Two threads access the same bytes, at least one of them writes, and nothing orders them."""
