"""`dcvision compare`."""

from dctrain.compare import comparison

compare = comparison("dcvision", {"val/top1": "max", "val/top5": "max"})
