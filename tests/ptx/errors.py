"""Error of the PTX executor."""


class PTXError(Exception):
    """Invalid memory access or unsupported kernel. The message names program, instruction and source line."""
