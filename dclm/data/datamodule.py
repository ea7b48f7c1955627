"""TokenDataModule: sequences of tokens, exact over ranks, workers and restarts."""

from functools import cached_property

from torch.utils.data import DataLoader

from dctrain.cli.argument_types import check_types
from dctrain.data.datamodule import ResumableDataModule
from dctrain.errors import UserError, as_user_error

from ..synthetic_tasks.stream import NAME as TASKS
from ..synthetic_tasks.stream import TaskStream, TaskTexts
from .masking import Masking, check_masking
from .megatron_indexed import PREFIX, IndexedCorpus
from .samples import TokenSamples, collate
from .stdlib import stdlib_corpus
from .token_files import Corpus
from .tokenizers import BYTES, ByteTokenizer, Tokenizer, open_tokenizer, tokenizer_from_spec

STDLIB = "stdlib"
EVALUATION_SEED = 0  # seed of masks, independent of the run's seed


def open_corpus(tokens: str, tokenizer: str | None) -> Corpus | IndexedCorpus | TaskStream:
    """Open the corpus given by `tokens` and `tokenizer` of `TokenDataModule`.

    Raises:
        UserError: If it cannot be opened.
    """
    tokens = str(tokens)
    if tokens == TASKS:
        return TaskStream()
    if not tokens.startswith(PREFIX):
        return Corpus(stdlib_corpus() if tokens == STDLIB else tokens)
    if tokenizer is None:
        raise UserError(f"{tokens} has no tokenizer; data.tokenizer is required.")
    return IndexedCorpus(tokens.removeprefix(PREFIX), open_tokenizer(tokenizer))


def embedding_rows(
    tokens: str, tokenizer: str | None, vocab_size: int | None, vocab_multiple: int, mask_fraction: float | None
) -> int:
    """Return the number of embedding rows: `vocab_size`, or the size needed by tokenizer and mask, rounded up.

    Raises:
        UserError: If a number is out of range, both are given, or the corpus cannot be opened.
    """
    if vocab_multiple < 1 or (vocab_size is not None and vocab_size < 1):
        raise UserError(f"{vocab_size=} and {vocab_multiple=} must be at least 1.")
    if vocab_size is not None and vocab_multiple != 1:
        raise UserError(f"{vocab_size=} and {vocab_multiple=} are both given; expected one of the two.")
    if vocab_size is not None:
        return vocab_size
    needed = ByteTokenizer.vocab_size if tokens == STDLIB else open_corpus(tokens, tokenizer).vocab_size
    needed += mask_fraction is not None
    return -(-needed // vocab_multiple) * vocab_multiple


class TokenDataModule(ResumableDataModule):
    """Sequences of T tokens from a prepared corpus.

    Samples: the concatenated training tokens, split every T tokens; a document may continue in another sample.

    Ranks: every rank takes its slice of one global order, so the trainer must not add a distributed sampler
    (`use_distributed_sampler: false`, which the command line sets).

    Epoch: every sample once, in an order that is a function of (seed, epoch); an incomplete global batch at the end is
    dropped. Evaluation uses the first `val_tokens` tokens of the split "val" once; padding samples have targets -100.

    Objective: the next token; with `mask_fraction`, masked tokens (`dclm.data.masking.Masking`), different ones in each
    epoch, always the same in evaluation. The mask token is the first id after the tokenizer's.

    Resume: training continues with the next sample, also with a different number of ranks or batch size.

    Args:
        tokens: Folder written by `dclm tokens`; "stdlib": the Python sources of the standard library; "idxmap:PREFIX":
            tokens in Megatron's indexed format, all for training; or "tasks": generated synthetic tasks
            (`dclm.synthetic_tasks`), of which only the answers are targets.
        validation: Validation tokens: the split "val" of a folder, or all of an "idxmap:PREFIX". None for those of
            `tokens`, if it is a folder.
        tokenizer: Tokenizer of an "idxmap:PREFIX": "bytes", a `tokenizer.json`, or a hub name. Folders contain theirs.
        vocab_size: Upper limit of ids; at least the tokenizer's size (plus the mask token), the default.
        context_length: Tokens T per sequence.
        batch_size: Sequences per rank and step.
        num_workers: Loader workers per rank; 0 loads in the main process, which is sufficient for memory-mapped tokens.
        seed: Seed of the order.
        val_tokens: Tokens of an evaluation; None for all.
        separate_documents: Restrict attention to each document.
        vocab_multiple: If `vocab_size` is None, the tokenizer's size is rounded up to a multiple of this.
        mask_fraction: Fraction of masked tokens for models with `is_causal: false`, such as 0.15; None for next-token
            prediction.
        mask_span: Mean length of masked spans, 1 to 5; 3.8 in SpanBERT.

    Raises:
        UserError: If the corpus cannot be opened or does not match the other arguments.
    """

    def __init__(
        self,
        tokens: str = STDLIB,
        vocab_size: int | None = None,
        context_length: int = 256,
        batch_size: int = 16,
        num_workers: int = 0,
        seed: int = 0,
        val_tokens: int | None = 2**20,
        separate_documents: bool = False,
        validation: str | None = None,
        tokenizer: str | None = None,
        vocab_multiple: int = 1,
        mask_fraction: float | None = None,
        mask_span: float = 1,
    ) -> None:
        super().__init__(batch_size, num_workers, seed, sample_noun="sequences")
        self.save_hyperparameters(logger=False)
        check_types(type(self).__init__, self.hparams)
        if context_length < 1 or (val_tokens is not None and val_tokens < 1):
            raise UserError(f"{context_length=} and {val_tokens=} must be at least 1.")
        if mask_fraction is not None:
            check_masking(mask_fraction, mask_span)
        elif mask_span != 1:
            raise UserError(f"{mask_span=} requires mask_fraction.")
        self.tokens, self.context_length = tokens, context_length
        self.mask_fraction, self.mask_span = mask_fraction, mask_span
        self.vocab_size = embedding_rows(tokens, tokenizer, vocab_size, vocab_multiple, mask_fraction)
        sources = [str(one) for one in (tokens, validation) if one is not None]
        if tokenizer is not None and tokens != TASKS and not any(one.startswith(PREFIX) for one in sources):
            raise UserError(f"data.tokenizer={tokenizer!r}: data.tokens={tokens!r} has its own tokenizer; remove it.")
        self.val_tokens, self.separate_documents = val_tokens, separate_documents
        self.validation, self.tokenizer = validation, tokenizer
        self.corpus: Corpus | IndexedCorpus | TaskStream | None = None
        self.val_corpus: Corpus | IndexedCorpus | TaskStream | None = None
        self.train_samples: TokenSamples | TaskTexts | None = None
        self.val_samples: TokenSamples | TaskTexts | None = None
        if tokens == TASKS and (val_tokens is None or validation or tokenizer or separate_documents or mask_fraction):
            raise UserError(
                f"data.tokens={TASKS} requires a finite data.val_tokens, and no validation, tokenizer, "
                "separate_documents, mask_fraction."
            )

    def prepare_data(self) -> None:
        """Prepare the built-in corpus, once per machine."""
        if STDLIB in (self.tokens, self.validation):
            stdlib_corpus()

    def setup(self, stage: str) -> None:
        """Open the corpus and check it."""
        self.check_trainer()
        self.corpus = self.val_corpus = open_corpus(self.tokens, self.tokenizer)
        if self.validation is not None:
            self.val_corpus = open_corpus(self.validation, self.tokenizer)
            self._check_validation()
        elif isinstance(self.corpus, IndexedCorpus):
            raise UserError(f"data.tokens={self.tokens} is used for training only; data.validation is required.")
        self.corpus.tokenizer()  # loaded now, because checkpoints contain it
        mask = 0 if self.mask_fraction is None else 1
        if self.corpus.vocab_size + mask > self.vocab_size:
            raise UserError(
                f"the corpus {self.corpus.folder} has a vocabulary of {self.corpus.vocab_size + mask}"
                f"{' including a mask token' * mask}; data.vocab_size={self.vocab_size} must be at least that."
            )
        if stage == "fit":
            self.train_samples = self._open(self.corpus, "train")
            self.check_steps()
        self.val_samples = self._open(self.val_corpus, "val")

    def _check_validation(self) -> None:
        ours, theirs = self.corpus.tokenizer().spec, self.val_corpus.tokenizer().spec
        if ours != theirs:
            raise UserError(
                f"data.validation={self.validation} and data.tokens={self.tokens} have different tokenizers."
            )

    def _open(self, corpus: Corpus | IndexedCorpus | TaskStream, split: str) -> TokenSamples | TaskTexts:
        if isinstance(corpus, TaskStream):
            return corpus.texts(split, self.context_length)
        row, masking = corpus.split(split), self._masking(corpus)
        limit = self.vocab_size if masking is None else masking.mask_id
        if row.max_token >= limit:
            raise UserError(
                f"{row.name} has token {row.max_token}; expected 0 to {limit - 1} "
                f"(data.vocab_size={self.vocab_size}{'' if masking is None else ', and the mask'})."
            )
        mask_seed = self.seed if split == "train" else EVALUATION_SEED
        samples = TokenSamples(row, self.context_length, limit, self.separate_documents, masking, mask_seed)
        if len(samples) < 1:
            raise UserError(
                f"{row.name} has {len(row)} tokens; a sequence needs {self.context_length} and one more "
                f"(data.context_length={self.context_length})."
            )
        return samples

    def _masking(self, corpus: Corpus | IndexedCorpus) -> Masking | None:
        if self.mask_fraction is None:
            return None
        return Masking(self.mask_fraction, self.mask_span, corpus.vocab_size, (corpus.tokenizer().eos_id,))

    def count_samples(self) -> int:
        """Count the sequences of the training split."""
        return len(self._open(open_corpus(self.tokens, self.tokenizer), "train"))

    @property
    def num_samples(self) -> int:
        """Number of sequences in the training split."""
        return len(self.train_samples)

    def fixed(self) -> dict[str, object]:
        """Settings that cannot change when a run is resumed, including tokens, masking and context length."""
        names = ("mask_fraction", "mask_span", "separate_documents")
        corpus = self.corpus.identity if isinstance(self.corpus, Corpus) else None
        return super().fixed() | {name: getattr(self, name) for name in names} | {"corpus": corpus}

    @property
    def num_val_samples(self) -> int:
        """Number of sequences in an evaluation."""
        count = len(self.val_samples)
        return count if self.val_tokens is None else min(count, -(-self.val_tokens // self.context_length))

    @cached_property
    def bytes_per_token(self) -> float | None:
        """Bytes of source text per token of an evaluation, for bits per byte; end tokens have none.

        None for tasks and masked tokens, whose targets are a subset. For old corpora without document lengths the
        decoded text is counted.
        """
        if isinstance(self.val_samples, TaskTexts) or self.mask_fraction is not None:
            return None
        count, row = self.num_val_samples * self.context_length, self.val_samples.row
        tokenizer = self.val_corpus.tokenizer()
        by_documents = None if tokenizer.spec == BYTES else row.num_bytes(1, count + 1)
        return (tokenizer.num_bytes(row[1 : count + 1]) if by_documents is None else by_documents) / count

    def train_dataloader(self) -> DataLoader:
        """Create the training loader, starting at the current position."""
        return self.make_loader(self.train_samples, self.train_batches([self.num_samples]), collate)

    def val_dataloader(self) -> DataLoader:
        """Create the evaluation loader."""
        return self.make_loader(self.val_samples, self.eval_batches(self.num_val_samples), collate)

    test_dataloader = val_dataloader

    def state_dict(self) -> dict:
        """Save the position in the training data, and the tokenizer, so that checkpoints are sufficient for
        generation."""
        return super().state_dict() | {"tokenizer": self.corpus.tokenizer().spec, "eos": self.corpus.eos}

    def load_state_dict(self, state_dict: dict) -> None:
        """Restore the position of a checkpoint.

        Raises:
            UserError: If it is invalid, or the tokenizers of data and checkpoint differ.
        """
        if "tokenizer" in state_dict and self.corpus is not None:
            with as_user_error("the tokenizer of the checkpoint cannot be read"):
                theirs = tokenizer_from_spec(state_dict["tokenizer"], state_dict.get("eos"))
            check_same_tokenizer("the checkpoint", theirs, self.corpus)
        super().load_state_dict(state_dict if "epoch" in state_dict else {})


def check_same_tokenizer(whose: str, theirs: Tokenizer, corpus: Corpus | IndexedCorpus | TaskStream) -> None:
    """Compare a model's tokenizer with the data's.

    Args:
        whose: Name of the model in the message.
        theirs: Tokenizer of the model.
        corpus: The data.

    Raises:
        UserError: If the vocabularies differ.
    """
    if not theirs.same_ids(corpus.tokenizer()):
        raise UserError(f"data.tokens={corpus.folder}: its tokenizer differs from {whose}'s.")
