"""`dcvision compare`."""

from dctrain.compare import compare_command

compare = compare_command("dcvision", {"val/top1": "max", "val/top5": "max"})
