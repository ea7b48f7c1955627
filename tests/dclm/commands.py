"""Helpers that run the command line of dclm."""

from functools import partial
from pathlib import Path

from dclm.cli import main
from tests.dctrain.commands import spawn as spawn_python

SMALL = [
    *("--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"),
    *("--trainer.gradient_clip_val=1.0", "--trainer.log_every_n_steps=1", "--trainer.max_epochs=3"),
    *("--model.model=dcformer_pp_debug", "--model.lr=0.003", "--model.warmup_fraction=0.1", "--name=t"),
    "--model.overrides={num_layers: 2, dim: 32, mlp_dim: 48, windows: [8, null]}",
    *("--data.context_length=24", "--data.batch_size=4", "--data.vocab_size=257"),
]


def small(corpus: Path, root: Path) -> list[str]:
    """Return the arguments of a tiny run on the numbered corpus, with ten batches of four sequences per epoch."""
    return [*SMALL, f"--data.tokens={corpus}", f"--trainer.default_root_dir={root}"]


def run(*args: str) -> None:
    """Run the command line in the current process."""
    main(list(args))


spawn = partial(spawn_python, prefix=("-m", "dclm"))
