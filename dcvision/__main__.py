"""`python -m dcvision`."""

from dctrain.cli.entry_points import dcvision

if __name__ == "__main__":
    dcvision()
