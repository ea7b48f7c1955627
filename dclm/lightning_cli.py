"""Lightning subcommands of `dclm`: fit, validate, test."""

from lightning.pytorch.utilities import rank_zero_only

from dctrain.cli.lightning_cli import VocabularyCLI
from dctrain.errors import UserError

from .cli import PROGRAM
from .config import DEFAULT_MODEL
from .data import TokenDataModule
from .data.datamodule import check_same_tokenizer, embedding_rows, open_corpus
from .derived_config import derive_model
from .language_model import LanguageModel, check_objective
from .load import load_tokenizer


class LanguageCLI(VocabularyCLI):
    """Command line for language models."""

    program = PROGRAM
    vocabulary_rows = staticmethod(embedding_rows)
    linked = ("context_length", "seed")
    monitor = "val/loss"
    monitor_mode = "min"
    init_sources = "a checkpoint or run of dclm, or a folder of a DCFormer, DCPythia, Pythia or Llama model"
    best_name = "best-step={step}-loss={val/loss:.4f}"

    def __init__(self, args: list[str]) -> None:
        super().__init__(LanguageModel, TokenDataModule, args)

    def add_arguments_to_parser(self, parser) -> None:
        """Make the model optional, because `--init` can define it."""
        super().add_arguments_to_parser(parser)
        parser.set_defaults({"model.model": None})

    def before_instantiate_classes(self) -> None:
        """Use the model of `--init`, and check the objective."""
        self._name_model()
        model, data = self.setting("model"), self.setting("data")
        check_objective((model.overrides or {}).get("is_causal", True), data.mask_fraction)

    def _name_model(self) -> None:
        """Use the model of `--init`, or the default model, unless one is given."""
        model, source = self.setting("model"), self.setting("init")
        if model.model is not None:
            return
        if not source:
            model.model = DEFAULT_MODEL
            return
        derived = derive_model(source, model.overrides or {})
        if model.vocab_size > derived.vocab_size:
            raise UserError(
                f"the data require {model.vocab_size} embedding rows, but init={source} has {derived.vocab_size}: "
                "it has a different tokenizer."
            )
        model.model, model.overrides, model.vocab_size = derived
        data = self.setting("data")
        data.vocab_size, data.vocab_multiple = derived.vocab_size, 1  # record the number of rows in config.yaml
        rank_zero_only(print)(f"model from {source}: {derived.model} with {derived.overrides}", flush=True)

    def check_init(self, source: str) -> None:
        """Check that initial weights and data have the same tokenizer."""
        theirs = load_tokenizer(source)
        if theirs is not None:
            self.datamodule.prepare_data()
            corpus = open_corpus(self.datamodule.tokens, self.datamodule.tokenizer)
            check_same_tokenizer(f"init={source}", theirs, corpus)

    def describe_score(self, score: float) -> str:
        """Format the loss in nats."""
        return f"{score:.4f} nats per token"
