"""Run the command line in this process or in a subprocess."""

from functools import partial
from pathlib import Path

from dcvision.cli import main
from tests.dctrain.commands import spawn as spawn_python

SMALL = [
    *("--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"),
    *("--trainer.max_epochs=3", "--trainer.gradient_clip_val=1.0", "--trainer.log_every_n_steps=1"),
    *("--model.lr=0.003", "--model.mixup_alpha=0.3", "--model.warmup_steps=2"),
    *("--data.batch_size=4", "--data.min_crop_area=0.5", "--data.max_bad_images=5", "--name=t"),
    "--model.model_kwargs={proj_drop_rate: 0.1, depth: 2}",
]


def small(shards: str, root: Path) -> list[str]:
    """Return arguments of a tiny run on the numbered shards, with ten batches of four per epoch."""
    return [
        *SMALL,
        f"--data.train=shards:{shards}",
        f"--data.val=shards:{shards}",
        f"--trainer.default_root_dir={root}",
    ]


def run(*args: str) -> None:
    """Run the command line in this process."""
    main(list(args))


spawn = partial(spawn_python, prefix=("-m", "dcvision"))
