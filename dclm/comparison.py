"""`dclm compare`."""

from dctrain.compare import compare_command

compare = compare_command("dclm", {"val/loss": "min"})
