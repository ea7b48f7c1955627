"""`python -m dclm`."""

from dctrain.start import dclm

if __name__ == "__main__":
    dclm()
