"""Run a program with a limit on the size of its files: `python -m tests.faults.limited BYTES PROGRAM ARGUMENTS`."""

import resource
import runpy
import sys

if __name__ == "__main__":
    limit = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
