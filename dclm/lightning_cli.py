"""The subcommands of `dclm` that train and evaluate with Lightning."""

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
    """The trainers' command line for language models."""

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
        """Leave the model open: `--init` brings one."""
        super().add_arguments_to_parser(parser)
        parser.set_defaults({"model.model": None})

    def before_instantiate_classes(self) -> None:
        """Take over the model of `--init`; refuse a model and data of different objectives, of a plan too."""
        self._name_model()
        model, data = self._get(self.config, "model"), self._get(self.config, "data")
        check_objective((model.overrides or {}).get("is_causal", True), data.mask_fraction)

    def _name_model(self) -> None:
        """Take the default model, or that of `--init`, unless one is named."""
        model, source = self._get(self.config, "model"), self._get(self.config, "init", default=None)
        if model.model is not None:
            return
        if not source:
            model.model = DEFAULT_MODEL
            return
        derived = derive_model(source, model.overrides or {})
        if model.vocab_size > derived.vocab_size:
            raise UserError(
                f"the data need {model.vocab_size} rows of embeddings and init={source} has {derived.vocab_size}: "
                "it is of another tokenizer."
            )
        model.model, model.overrides, model.vocab_size = derived
        data = self._get(self.config, "data")
        data.vocab_size, data.vocab_multiple = derived.vocab_size, 1  # config.yaml has the rows that it was made with
        rank_zero_only(print)(f"the model is that of {source}: {derived.model} with {derived.overrides}", flush=True)

    def check_init(self, source: str) -> None:
        """Refuse weights of another tokenizer than the data's."""
        theirs = load_tokenizer(source)
        if theirs is not None:
            self.datamodule.prepare_data()
            corpus = open_corpus(self.datamodule.tokens, self.datamodule.tokenizer)
            check_same_tokenizer(f"init={source}", theirs, corpus)

    def describe_score(self, score: float) -> str:
        """Write the loss in nats."""
        return f"{score:.4f} nats per token"
