"""`python -m dclm`."""

from dclm.cli import main

if __name__ == "__main__":
    main()
