"""The error of a kernel."""


class PTXError(Exception):
    """A kernel accesses memory wrongly, or is not supported; names the program, the instruction and its source line."""
