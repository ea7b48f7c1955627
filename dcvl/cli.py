"""Command line: `python -m dcvl fit|validate|test`, `caption|visualize|classify|retrieve|embed|export|compare`."""

from dctrain.cli.named_configs import listing
from dctrain.cli.program import run_program
from dctrain.cli.subcommands import Program

configs = listing("dcvl", "vl")

PROGRAM = Program(
    name="dcvl",
    description="Images and texts with DCMHA.",
    functions={
        **{use: f"dcvl.commands.{use}:{use}" for use in ("caption", "classify", "retrieve", "embed", "visualize")},
        "export": "dcvl.load:export",
        "configs": "dcvl.cli:configs",
        "compare": "dcvl.comparison:compare",
    },
    trainer="dcvl.lightning_cli:VisionLanguageCLI",
)


def main(args: list[str] | None = None) -> None:
    """Run the command line."""
    run_program(PROGRAM, args)
