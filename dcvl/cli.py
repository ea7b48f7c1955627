"""Command line: `python -m dcvl fit|validate|test`, `caption|look|classify|retrieve|embed|export|compare`."""

from dctrain.cli import VocabularyCLI, run_program
from dctrain.compare import comparison
from dctrain.named_configs import listing

from .data import CaptionDataModule
from .data.datamodule import vocabulary_rows
from .initial import check_tokenizer
from .load import export
from .use import caption, classify, embed, look, retrieve
from .vision_language_model import VisionLanguageModel


class VisionLanguageCLI(VocabularyCLI):
    """The trainers' command line for models of images and texts."""

    program = "dcvl"
    description = "Images and texts with DCMHA."
    functions = {
        "caption": caption,
        "classify": classify,
        "retrieve": retrieve,
        "embed": embed,
        "look": look,
        "export": export,
        "configs": listing("dcvl", "vl"),
        "compare": comparison("dcvl", {"val/loss": "min"}),
    }
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
        """Train, from where `--resume` says; a run that starts from a text tower has its tokenizer."""
        source = self._get(self.config, "init")
        if source is not None and self.resume_from is None:
            check_tokenizer(source, self.datamodule.words)
        super().fit(model, **kwargs)

    def describe_score(self, score: float) -> str:
        """Write the loss in nats."""
        return f"{score:.4f} nats"


def main(args: list[str] | None = None) -> None:
    """Run the command line."""
    run_program(VisionLanguageCLI, args)
