"""Lightning subcommands of `dcvl`: fit, validate, test."""

from dctrain.cli.lightning_cli import VocabularyCLI

from .cli import PROGRAM
from .data import CaptionDataModule
from .data.datamodule import vocabulary_rows
from .init_from import check_tokenizer
from .vision_language_model import VisionLanguageModel


class VisionLanguageCLI(VocabularyCLI):
    """Command line for vision-language models."""

    program = PROGRAM
    vocabulary_rows = staticmethod(vocabulary_rows)
    linked = ("image_size", "context_length", "seed")
    monitor = "val/loss"
    monitor_mode = "min"
    init_sources = (
        "a checkpoint, run or export of dcvl, or image=SOURCE,text=SOURCE (or one of them) with what dcvision and dclm "
        "start from"
    )
    best_name = "best-step={step}-loss={val/loss:.4f}"

    def __init__(self, args: list[str]) -> None:
        super().__init__(VisionLanguageModel, CaptionDataModule, args)

    def fit(self, model: VisionLanguageModel, **kwargs) -> None:
        """Train: from the checkpoint of `--resume`, from the weights of `--init`, or from random weights."""
        source = self.setting("init")
        if source is not None and self.resume_from is None:
            check_tokenizer(source, self.datamodule.words)
        super().fit(model, **kwargs)

    def describe_score(self, score: float) -> str:
        """Format the loss in nats."""
        return f"{score:.4f} nats"
