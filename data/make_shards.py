"""Convert an image dataset to WebDataset shards; equivalent to `python -m dcvision shards`."""

import sys

from dcvision.cli import main

if __name__ == "__main__":
    main(["shards", *sys.argv[1:]])
