"""Helpers that run the command line of dcvl."""

import io
import json
from functools import partial
from pathlib import Path

from PIL import Image

from dcvl.cli import main
from dcvl.data.scenes import scene_tokenizer
from tests.conftest import write_shard
from tests.dctrain.commands import spawn as spawn_python

SMALL = [
    *("--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"),
    *("--trainer.max_steps=6", "--trainer.gradient_clip_val=1.0", "--trainer.log_every_n_steps=1", "--name=t"),
    *("--model.model=dcvit_small_patch4_32", "--model.model_kwargs={embed_dim: 32, depth: 2, num_heads: 4}"),
    "--model.text_overrides={dim: 32, num_layers: 2, num_heads: 4, mlp_dim: 48, windows: [null]}",
    *("--model.lr=0.003", "--model.embed_dim=16", "--data.batch_size=4", "--data.val_samples=6"),
]


def small(root: Path) -> list[str]:
    """Return the arguments of a tiny run on digit scenes: six batches of four."""
    return [*SMALL, f"--trainer.default_root_dir={root}"]


def captioned_shard(path: Path, captions: list[str]) -> str:
    """Write a shard of small images with captions; return its path."""
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), "white").save(buffer, "PNG")
    samples = [{"__key__": f"{n}", "png": buffer.getvalue(), "txt": caption} for n, caption in enumerate(captions)]
    return str(write_shard(path, samples))


def other_words(path: Path) -> Path:
    """Write the tokenizer of the scenes with the ids of two words swapped; return its path."""
    words = json.loads(scene_tokenizer().spec)
    vocabulary = words["model"]["vocab"]
    vocabulary["four"], vocabulary["nine"] = vocabulary["nine"], vocabulary["four"]
    path.write_text(json.dumps(words))
    return path


def run(*args: str) -> None:
    """Run the command line in this process."""
    main(list(args))


spawn = partial(spawn_python, prefix=("-m", "dcvl"))
