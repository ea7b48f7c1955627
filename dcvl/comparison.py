"""`dcvl compare`."""

from dctrain.compare import comparison

compare = comparison("dcvl", {"val/loss": "min"})
