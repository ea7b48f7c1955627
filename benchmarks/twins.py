"""Train models on the same tokens in the same order, over seeds, and compare their validation losses.

python benchmarks/twins.py --config configs/lm/stdlib.yaml --seeds 0 1 2 --json FILE
python benchmarks/twins.py --config configs/lm/small.yaml --models dcformer_pp_405m transformer_pp_405m --seeds 0
Arguments after -- go to every run, such as -- --trainer.max_steps 1000.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from measure import save
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tqdm import tqdm

from dctrain.environment import environment

FINAL = ("val/loss", "val/bits_per_byte", "train/tokens_per_second")
PLAIN = "pre_compose=false post_compose=false"  # the composed model's twin in attention alone


def train(name: str, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """Train one model in a process of its own; return what its log ends with."""
    model, *overrides = name.split()
    with tempfile.TemporaryDirectory() as root:
        command = [sys.executable, "-m", "dclm", "fit", "--config", options.config, "--name=run"]
        command += [f"--model.model={model}", f"--data.seed={seed}", f"--seed_everything={seed}"]
        command += [f"--model.overrides.{override}" for override in overrides]
        command += [f"--trainer.default_root_dir={root}", "--trainer.enable_progress_bar=false", *options.extra]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)}\n{done.stderr}")
        log = EventAccumulator(str(Path(root) / "run/version_0")).Reload()
        return {
            tag: statistics.median(_values(log, tag)) if "second" in tag else _values(log, tag)[-1] for tag in FINAL
        }


def _values(log: EventAccumulator, tag: str) -> list[float]:
    return [event.value for event in log.Scalars(tag)]


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    models = ["dcformer_pp_debug", f"dcformer_pp_debug {PLAIN}", "transformer_pp_debug"]
    parser.add_argument("--models", nargs="+", default=models, help="names, with field=value overrides after a space")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", help="file for the raw result")
    parser.add_argument("extra", nargs="*", help="arguments for every run")
    options = parser.parse_args()
    runs: dict[str, list[dict]] = {name: [] for name in options.models}
    for seed in tqdm(options.seeds, desc="seeds"):
        for name in options.models:
            runs[name].append({"seed": seed, **train(name, seed, options)})
    for name, results in runs.items():
        losses = [result["val/loss"] for result in results]
        spread = statistics.stdev(losses) if len(losses) > 1 else float("nan")
        rate = statistics.median(result["train/tokens_per_second"] for result in results)
        print(
            f"{name:70} val loss {statistics.mean(losses):.4f}, sd {spread:.4f}, n {len(losses)}; {rate:.0f} tokens/s"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    save(options.json, {"environment": environment(device), "options": vars(options), "runs": runs})


if __name__ == "__main__":
    main()
