"""`python -m dcvl`."""

from dcvl.cli import main

if __name__ == "__main__":
    main()
