"""Convert texts to token files; equivalent to `python -m dclm tokens`."""

import sys

from dclm.cli import main

if __name__ == "__main__":
    main(["tokens", *sys.argv[1:]])
