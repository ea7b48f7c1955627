"""`python -m dcvision`."""

from dcvision.cli import main

if __name__ == "__main__":
    main()
