"""`python -m dcvl`."""

from dctrain.start import dcvl

if __name__ == "__main__":
    dcvl()
