"""`python -m dcvision`."""

from dctrain.start import dcvision

if __name__ == "__main__":
    dcvision()
