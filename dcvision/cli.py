"""Command line: `python -m dcvision fit|validate|test|predict|export|evaluate|compare|visualize|...`."""

from dctrain.cli.named_configs import listing
from dctrain.cli.program import run_program
from dctrain.cli.subcommands import Program

from .explain import EXPLANATIONS

configs = listing("dcvision", "vision")

PROGRAM = Program(
    name="dcvision",
    description="Image classification with DCMHA.",
    functions={
        "export": "dcvision.export:export",
        "evaluate": "dcvision.evaluation:evaluate",
        "configs": "dcvision.cli:configs",
        "compare": "dcvision.comparison:compare",
        "explain": EXPLANATIONS,
        "visualize": "dcvision.visualize:visualize",
        "shards": "dcvision.data.make_shards:make_shards",
        "verify": "dcvision.data.make_shards:verify",
    },
    trainer="dcvision.lightning_cli:VisionCLI",
)


def main(args: list[str] | None = None) -> None:
    """Run the command line."""
    run_program(PROGRAM, args)
