"""Command line: `python -m dclm fit|validate|test --config FILE ...`, `generate|export|evaluate|compare|...`."""

from dctrain.cli.named_configs import listing
from dctrain.cli.program import run_program
from dctrain.cli.subcommands import Program

from .explain import EXPLANATIONS

configs = listing("dclm", "lm")

PROGRAM = Program(
    name="dclm",
    description="Language models with DCMHA.",
    functions={
        "generate": "dclm.commands:generate",
        "export": "dclm.commands:export",
        "tokens": "dclm.data.make_tokens:make_tokens",
        "verify": "dclm.data.make_tokens:verify",
        "suite": "dclm.commands:suite",
        "evaluate": "dclm.evaluation:evaluate",
        "configs": "dclm.cli:configs",
        "compare": "dclm.comparison:compare",
        "explain": EXPLANATIONS,
    },
    trainer="dclm.lightning_cli:LanguageCLI",
)


def main(args: list[str] | None = None) -> None:
    """Run the command line."""
    run_program(PROGRAM, args)
