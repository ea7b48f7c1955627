"""`python -m dcvl`."""

from dctrain.cli.entry_points import dcvl

if __name__ == "__main__":
    dcvl()
