"""Turn an image set into WebDataset shards; the same as `python -m dcvision shards`."""

import sys

from dcvision.cli import main

if __name__ == "__main__":
    main(["shards", *sys.argv[1:]])
