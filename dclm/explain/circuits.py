"""`dclm explain circuits`: OV circuits of heads (equation 12), and heads that copy or follow a relation."""

# N tokens, H heads, C model width, V vocabulary

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from dcmha.analysis import head_outputs
from dctrain.checkpointing.checkpoint import make_folder
from dctrain.errors import UserError, as_user_error
from dctrain.evaluation.run import check_at_least_one, find_dtype
from dctrain.explain.circuits_report import explain_circuits, list_written, score_head
from dctrain.explain.explanation import origin_of, write_explanation
from dctrain.utils.files import check_regular

from ..data.tokenizers import Tokenizer
from ..decoder import Decoder
from ..load import load_model
from .prompts import one_token


class RelationPairs(NamedTuple):
    """Tokens and their partners, ids [N] each."""

    name: str
    sources: Tensor
    targets: Tensor


def circuits(
    checkpoint: str,
    words: Sequence[str] = (),
    relations: Sequence[str] = (),
    top: int = 10,
    sample: int = 256,
    out: str = "circuits",
    tokenizer: str | None = None,
    device: str = "cpu",
    dtype: str | None = None,
) -> None:
    """List the tokens that each head's OV circuit writes for a token, and heads that copy or follow a relation.

    As in appendix G.1 the input of a circuit is the token's embedding plus the output of the first MLP, normalized by
    the layer's norm, and its output is multiplied by the output embedding (equation 12; without the final norm).
    Attention is not used. The logits of one head at a time are in memory.

    Args:
        checkpoint: A model, as in `generate`.
        words: Tokens for which circuits are listed; a leading space is part of the token.
        relations: Files of pairs, one tab-separated token and partner per line, such as an object and its superclass.
        top: Number of listed tokens per head, and maximum rank of a partner to count as found.
        sample: Number of random tokens of the vocabulary for the copying score; all if there are fewer.
        out: Folder for heads.csv, heads.png, and circuits.csv if words are given.
        tokenizer: "bytes", a tokenizer.json or a hub name; default: the tokenizer of the checkpoint or folder.
        device: Device, such as cuda.
        dtype: "float32", "bfloat16" or "float16"; default: the dtype of the weights.

    Raises:
        UserError: If an input cannot be read, a word is not a single token, or a file has no pairs.
    """
    asked = locals().copy()
    folder = make_folder(out)
    check_at_least_one(top=top, sample=sample)
    model = load_model(checkpoint, tokenizer, dtype=find_dtype(dtype), device=device)
    decoder, vocabulary = model
    sources = torch.tensor([one_token(vocabulary, word) for word in words], dtype=torch.long)
    pairs = [_copies(vocabulary, sample), *(_read_pairs(vocabulary, Path(path)) for path in relations)]
    written, scores = [], []
    for layer, head, circuit in _circuits(decoder):
        place = (layer, head)
        if words:
            written += list_written(*place, words, circuit(sources), lambda token: vocabulary.decode([token]), top)
        scores += [score_head(*place, one.name, circuit(one.sources), one.targets, top) for one in pairs]
    write_explanation(explain_circuits(scores, written, top), folder, [origin_of(checkpoint, decoder)], asked)


def _circuits(decoder: Decoder) -> Iterator[tuple[str, int, "Circuit"]]:
    """Yield the circuits of all heads of all layers."""
    for number in tqdm(range(len(decoder.blocks)), "layers", unit="layer", leave=False):
        for head in range(decoder.blocks[number].attn.num_heads):
            yield f"blocks.{number}.attn", head, Circuit(decoder, number, head)


class Circuit(NamedTuple):
    """The OV circuit of a head (equation 12)."""

    decoder: Decoder
    layer: int
    head: int

    @torch.inference_mode()
    def __call__(self, ids: Tensor) -> Tensor:
        """Compute the logits [N, V] that the head writes for tokens [N], float32."""
        first, block = self.decoder.blocks[0], self.decoder.blocks[self.layer]
        x = self.decoder.embed(ids.to(self.decoder.device))
        x = x + first.mlp(first.mlp_norm(x))
        written = head_outputs(block.attn, block.attn_norm(x), self.head)
        return F.linear(written, self.decoder.output.weight).float()


def _copies(tokenizer: Tokenizer, count: int) -> RelationPairs:
    """Sample tokens of the vocabulary, which are their own partners."""
    drawn = torch.randperm(tokenizer.vocab_size, generator=torch.Generator().manual_seed(0))[:count]
    return RelationPairs("copy", drawn, drawn)


def _read_pairs(tokenizer: Tokenizer, path: Path) -> RelationPairs:
    """Read a relation.

    Raises:
        UserError: If the file cannot be read or has no pairs, or an entry is not a single token.
    """
    with as_user_error(f"cannot read {path}"), open(check_regular(path), newline="", encoding="utf-8") as file:
        numbered = enumerate(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE), 1)
        lines = {number: line for number, line in numbered if line}
    wrong = next((number for number, line in lines.items() if len(line) != 2), None)
    if wrong is not None or not lines:
        got = f"{path} is empty" if not lines else f"{path}: line {wrong} is not a pair"
        raise UserError(f"{got}; expected a tab-separated token and partner per line.")
    sources, targets = ([one_token(tokenizer, word) for word in column] for column in zip(*lines.values(), strict=True))
    return RelationPairs(path.stem, torch.tensor(sources), torch.tensor(targets))
