"""Lightning subcommands of `dcvision`: fit, validate, test, predict."""

import csv
import io
from pathlib import Path

from dctrain.checkpointing.checkpoint import make_folder
from dctrain.cli.lightning_cli import TrainerCLI, reading
from dctrain.distributed.strategy import data_rank
from dctrain.utils.files import atomic_write, check_writable, relative
from dctrain.utils.signals import exits_on_sigterm

from . import callbacks  # noqa: F401  their names are options of --trainer.callbacks
from .classifier import ImageClassifier
from .cli import PROGRAM
from .data import ImageDataModule


class VisionCLI(TrainerCLI):
    """Command line for image classification."""

    program = PROGRAM
    linked = ("num_classes", "image_size", "seed")
    monitor = "val/top1"
    monitor_mode = "max"
    init_sources = "a checkpoint or run of dcvision, an exported folder, or a timm name with pretrained weights"
    best_name = "best-epoch={epoch}-top1={val/top1:.4f}"

    def __init__(self, args: list[str]) -> None:
        super().__init__(ImageClassifier, ImageDataModule, args)

    def describe_score(self, score: float) -> str:
        """Format the accuracy in percent."""
        return f"{100 * score:.2f} %"

    def has_weights(self) -> bool:
        """Whether the model has timm's pretrained weights."""
        return bool((self.model.hparams.model_kwargs or {}).get("pretrained"))

    def add_subcommand_arguments(self, parser, subcommand: str) -> None:
        """Add `--out` of `predict`."""
        super().add_subcommand_arguments(parser, subcommand)
        if subcommand == "predict":
            help_text = "Output file (CSV); default: predict/predictions.csv in the run of the checkpoint."
            parser.add_argument("--out", type=str | None, default=None, help=help_text)

    def predict(self, model: ImageClassifier, **kwargs) -> None:
        """Write the predicted class of each image to `--out`.

        The file has one line per image, with class names if they are known. With several ranks there is one file per
        rank.
        """
        path = self.evaluated_checkpoint()
        out = self.setting("out")
        if out is not None:
            check_writable("out", Path(out))
        with reading(path), exits_on_sigterm():
            batches = self.trainer.predict(model, **{**kwargs, "ckpt_path": path, "return_predictions": True})
        folder = self.trainer.log_dir  # a collective operation: called on all ranks
        rank, ranks = data_rank(self.trainer)
        self.trainer.strategy.barrier()  # wait for all ranks
        if self.trainer.global_rank % (self.trainer.world_size // ranks):
            return  # another rank has the same predictions
        path = Path(out or Path(folder) / "predictions.csv")
        path = path.with_stem(f"{path.stem}-rank{rank}") if ranks > 1 else path
        make_folder(str(path.parent))
        with atomic_write(path) as file:
            file.write(self._table(batches).encode())
        print(f"predictions {relative(path)}")

    def _table(self, batches: list[list[dict]]) -> str:
        """Format predictions as CSV."""
        text, names = io.StringIO(newline=""), self.datamodule.classes
        writer = csv.DictWriter(text, ["name", "class", "probability", *(["class_name"] if names else [])])
        writer.writeheader()
        for row in (row for batch in batches for row in batch):
            number = row["class"]
            writer.writerow(row | ({"class_name": "".join(names[number : number + 1])} if names else {}))
        return text.getvalue()
