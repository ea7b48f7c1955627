"""`python -m dclm`."""

from dctrain.cli.entry_points import dclm

if __name__ == "__main__":
    dclm()
