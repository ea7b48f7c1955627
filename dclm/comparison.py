"""`dclm compare`."""

from dctrain.compare import comparison

compare = comparison("dclm", {"val/loss": "min"})
