"""`dcvl compare`."""

from dctrain.compare import compare_command

compare = compare_command("dcvl", {"val/loss": "min"})
