"""Command line: `python -m dcvision fit|validate|test|predict --config FILE ...`, `export`, `compare` and `look`."""

import argparse
import csv
from pathlib import Path

from dctrain.cli import TrainerCLI, relative, run_command, run_lightning

from .classifier import ImageClassifier
from .compare import compare_command
from .data import ImageDataModule
from .export import export
from .look import look_command

MORE_HELP = (
    "More subcommands: export CHECKPOINT FOLDER writes a checkpoint as a timm model folder; compare trains several "
    "models with one recipe and writes a table and a plot; look CHECKPOINT IMAGE FOLDER draws what composition does."
)


class VisionCLI(TrainerCLI):
    """The trainers' command line for image classification."""

    program = "dcvision"
    linked = ("num_classes", "image_size", "seed")
    monitor = "val/top1"
    monitor_mode = "max"
    best_name = "best-epoch={epoch}-top1={val/top1:.4f}"

    def __init__(self, args: list[str]) -> None:
        super().__init__(ImageClassifier, ImageDataModule, args, f"Image classification with DCMHA. {MORE_HELP}")

    def describe_score(self, score: float) -> str:
        """Write the accuracy in percent."""
        return f"{100 * score:.2f} %"

    def has_weights(self) -> bool:
        """Tell whether the model is a pretrained one of timm's."""
        return bool((self.model.hparams.model_kwargs or {}).get("pretrained"))

    def predict(self, model: ImageClassifier, **kwargs) -> None:
        """Predict and write one line per image to `predictions.csv` (one file per rank on several)."""
        self.check_weights(kwargs)
        batches = self.trainer.predict(model, **{**kwargs, "return_predictions": True})
        suffix = f"-rank{self.trainer.global_rank}" if self.trainer.world_size > 1 else ""
        path = Path(self.trainer.log_dir) / f"predictions{suffix}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=["name", "class", "probability"])
            writer.writeheader()
            writer.writerows(row for batch in batches for row in batch)
        print(f"predictions {relative(path)}")


def _export_command(args: list[str]) -> None:
    parser = argparse.ArgumentParser("dcvision export", description="Write a checkpoint as a timm model folder.")
    parser.add_argument("checkpoint", help="a .ckpt file of dcvision fit, or the folder of a run")
    parser.add_argument("folder", help="where to write config.json and model.safetensors")
    parser.add_argument("--raw", action="store_true", help="the raw weights, where the run also kept an average")
    options = parser.parse_args(args)
    folder = export(options.checkpoint, options.folder, options.raw)
    print(f'exported to {folder}; load with timm.create_model("local-dir:{folder}", pretrained=True)')


def _command(args: list[str]) -> None:
    if args[:1] == ["export"]:
        _export_command(args[1:])
    elif args[:1] == ["compare"]:
        compare_command(args[1:])
    elif args[:1] == ["look"]:
        look_command(args[1:])
    else:
        run_lightning(lambda: VisionCLI(args))


def main(args: list[str] | None = None) -> None:
    """Run the command line."""
    run_command(_command, args)
