"""Tokenizers: bytes, or Hugging Face `tokenizers`."""

import codecs
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np

from dctrain.errors import UserError, as_user_error

BYTES = "bytes"
DECODED_TOGETHER = 2**18
END_TOKENS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<|eos|>", "[EOS]")


class Tokenizer(Protocol):
    """Interface of a tokenizer.

    Attributes:
        vocab_size: Upper limit of ids.
        eos_id: Id of the end-of-text token.
        begin_ids: Ids that the tokenizer prepends to a text, such as Llama's <s>; usually empty.
        spec: Text from which `tokenizer_from_spec` recreates the tokenizer.
    """

    vocab_size: int
    eos_id: int
    begin_ids: list[int]
    spec: str

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return the ids of each text, without special tokens."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, without special tokens."""

    def same_ids(self, other: "Tokenizer") -> bool:
        """Whether another tokenizer has the same ids."""

    def num_bytes(self, ids: np.ndarray) -> int:
        """Count the bytes of text of ids; special tokens have none."""

    def stream(self) -> Callable[[int], str]:
        """Return a function that accepts ids one by one and returns the text completed by each."""


class ByteTokenizer:
    """UTF-8 bytes, with 256 as the end-of-text token."""

    vocab_size = 257
    eos_id = 256
    begin_ids: ClassVar[list[int]] = []
    spec = BYTES

    def same_ids(self, other: "Tokenizer") -> bool:
        """Whether another tokenizer has the same ids."""
        return isinstance(other, ByteTokenizer)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return the bytes of each text."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text; invalid UTF-8 is replaced by the replacement character."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def num_bytes(self, ids: np.ndarray) -> int:
        """Count the ids that are bytes."""
        return int((ids < 256).sum())

    def stream(self) -> Callable[[int], str]:
        """Return a function that buffers the bytes of incomplete characters."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return lambda i: decoder.decode(bytes([i]) if i < 256 else b"")


MAX_IDS = 2**25  # limit far above any vocabulary


class SubwordTokenizer:
    """A Hugging Face tokenizer.

    Args:
        spec: Content of a `tokenizer.json`.
        eos: End-of-text token; None for the usual one.

    Raises:
        UserError: If the JSON is not a tokenizer, or does not have the token.
    """

    def __init__(self, spec: str, eos: str | None = None) -> None:
        import tokenizers

        with as_user_error("the tokenizer cannot be read"):
            self._tokenizer = tokenizers.Tokenizer.from_str(spec)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # the end token in a text is encoded as plain text
        self.spec = self._tokenizer.to_str()
        ids = self._tokenizer.get_vocab().values()
        if not ids or max(ids) >= MAX_IDS:
            raise UserError(
                f"the tokenizer has ids up to {max(ids, default=None)}; expected at least one, below {MAX_IDS}."
            )
        self.vocab_size = max(ids) + 1
        names = END_TOKENS if eos is None else (eos,)
        found = [i for i in map(self._tokenizer.token_to_id, names) if i is not None]
        if not found:
            raise UserError(f"the tokenizer has no end-of-text token; expected one of {', '.join(names)}.")
        self.eos_id = found[0]
        with as_user_error("the tokenizer cannot encode"):
            bare, marked = (self._tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
        if not bare:
            raise UserError("the tokenizer cannot encode the letter a.")
        self.begin_ids = marked[: next(i for i in range(len(marked)) if marked[i : i + len(bare)] == bare)]

    def same_ids(self, other: "Tokenizer") -> bool:
        """Whether another tokenizer has the same vocabulary."""
        is_subword = isinstance(other, SubwordTokenizer)
        return is_subword and self._tokenizer.get_vocab() == other._tokenizer.get_vocab()

    @property
    def eos_token(self) -> str:
        """Name of the end-of-text token."""
        return self._tokenizer.id_to_token(self.eos_id)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return the ids of each text."""
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(e.ids, dtype=np.uint32) for e in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids."""
        return self._tokenizer.decode(list(ids))

    def num_bytes(self, ids: np.ndarray) -> int:
        """Count the bytes of the text, in pieces."""
        pieces = np.array_split(ids, -(-len(ids) // DECODED_TOGETHER)) if len(ids) else []
        return sum(len(self.decode(piece.tolist()).encode()) for piece in pieces)

    def stream(self) -> Callable[[int], str]:
        """Return a function that buffers text that later ids may still change."""
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=True)
        return lambda i: stream.step(self._tokenizer, i) or ""


def tokenizer_from_spec(spec: str, eos: str | None = None) -> Tokenizer:
    """Create the tokenizer given by `spec`: "bytes" or a tokenizer's JSON."""
    return ByteTokenizer() if spec == BYTES else SubwordTokenizer(spec, eos)


def open_tokenizer(name: str, eos: str | None = None) -> Tokenizer:
    """Open a tokenizer.

    Args:
        name: "bytes", a `tokenizer.json`, a folder that contains one, or a name on the Hugging Face hub.
        eos: End-of-text token; None for the usual one.

    Raises:
        UserError: If it cannot be opened.
    """
    if name == BYTES:
        return ByteTokenizer()
    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    if path.is_file():
        with as_user_error(f"tokenizer={path} cannot be read"):
            text = path.read_text()
        try:
            return SubwordTokenizer(text, eos)
        except UserError as error:
            raise UserError(f"tokenizer={path}: {error}") from error
    if path.suffix == ".json" or len(path.parts) > 2:
        raise UserError(f"no tokenizer: {path} does not exist; expected 'bytes', a tokenizer.json or a hub name.")
    import tokenizers

    with as_user_error(f"tokenizer={name!r}: expected 'bytes', 'bpe:SIZE', a tokenizer.json or a hub name"):
        return SubwordTokenizer(tokenizers.Tokenizer.from_pretrained(name).to_str(), eos)


def train_bpe(texts: Iterable[str], vocab_size: int) -> SubwordTokenizer:
    """Train a lossless byte-level BPE, with "<|endoftext|>" as id 0.

    Raises:
        UserError: If `vocab_size` is too small for the 256 bytes and the end token.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < 257:
        raise UserError(f"bpe:{vocab_size} is too small; expected at least 257 (all bytes and the end token).")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TOKENS[0]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return SubwordTokenizer(json.dumps(json.loads(tokenizer.to_str())))
