"""`dclm explain circuits`: what heads write for a token (equation 12), and which heads copy or follow a relation."""

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
from dctrain.checkpoint import make_folder
from dctrain.errors import UserError, told_as
from dctrain.evaluation.run import check_at_least_one, find_dtype
from dctrain.explain.files import report, write_rows
from dctrain.explain.maps import draw_heads
from dctrain.markdown import markdown_table

from ..data.tokenizers import Tokenizer
from ..decoder import Decoder
from ..load import load_model
from .prompts import one_token

SHOWN = 10  # heads in the printed tables


class Written(NamedTuple):
    """A token that a head writes for another: the `rank`th of its logits."""

    layer: str
    head: int
    token: str
    rank: int
    writes: str
    logit: float


class Score(NamedTuple):
    """How well a head follows a relation.

    Attributes:
        layer: Name of the layer.
        head: Number of the head.
        relation: "copy", or the name of the file of pairs.
        in_top: Share of the tokens whose partner is among the `top` that the head writes.
        mean_reciprocal_rank: Mean of 1 / rank of the partner, 1 the best.
        tokens: How many there are.
    """

    layer: str
    head: int
    relation: str
    in_top: float
    mean_reciprocal_rank: float
    tokens: int


class Pairs(NamedTuple):
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
    """List the tokens that each head's OV circuit writes for a token, and the heads that copy or follow a relation.

    As in appendix G.1 the circuit is given the embedding and what the first MLP adds to it, normed as the layer norms
    it, and what it writes is multiplied by the output embedding (equation 12; no final norm). Where heads look plays no
    part. The logits of one head at a time are in memory.

    Args:
        checkpoint: A model, as `generate` takes it.
        words: Tokens whose circuits are listed; a space before a word belongs to it.
        relations: Files of pairs, a token and its partner a line with a tabulator between, such as an object and its
            superclass.
        top: Tokens listed of each head, and how good a partner must rank to count.
        sample: Tokens of the vocabulary by which copying is judged, drawn at random; all if there are fewer.
        out: Folder for heads.csv, heads.png, and circuits.csv if words are given.
        tokenizer: "bytes", a tokenizer.json or a hub name; by default the one in the checkpoint or folder.
        device: Where to run, such as cuda.
        dtype: "float32", "bfloat16" or "float16"; by default that of the weights.

    Raises:
        UserError: If something cannot be read, a word is not one token, or a file holds no pairs.
    """
    check_at_least_one(top=top, sample=sample)
    model = load_model(checkpoint, tokenizer, dtype=find_dtype(dtype), device=device)
    decoder, vocabulary = model
    asked = torch.tensor([one_token(vocabulary, word) for word in words], dtype=torch.long)
    pairs = [_copies(vocabulary, sample), *(_read_pairs(vocabulary, Path(path)) for path in relations)]
    written, scores = [], []
    for layer, head, logits_of in _circuits(decoder):
        if len(asked):
            written += _list(layer, head, vocabulary, asked, logits_of(asked), top)
        scores += [_score(layer, head, one, logits_of(one.sources), top) for one in pairs]
    folder, names = make_folder(out), ["heads.csv", "heads.png"]
    write_rows(folder / "heads.csv", scores)
    maps = {one.name: [(s.layer, s.head, s.in_top) for s in scores if s.relation == one.name] for one in pairs}
    draw_heads(maps, f"share of tokens whose partner is among the {top} that a head writes").savefig(folder / names[1])
    if written:
        names.append("circuits.csv")
        write_rows(folder / names[-1], written)
    report("\n\n".join([*_tables(scores, top), *_lists(written, scores)]), folder, names)


def _circuits(decoder: Decoder) -> Iterator[tuple[str, int, "Circuit"]]:
    """Yield the circuits of all heads, layer by layer."""
    for number in tqdm(range(len(decoder.blocks)), "layers", unit="layer", leave=False):
        for head in range(decoder.blocks[number].attn.num_heads):
            yield f"blocks.{number}.attn", head, Circuit(decoder, number, head)


class Circuit(NamedTuple):
    """What a head makes of tokens (equation 12)."""

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


def _copies(tokenizer: Tokenizer, count: int) -> Pairs:
    """Draw tokens of the vocabulary, which are their own partners."""
    drawn = torch.randperm(tokenizer.vocab_size, generator=torch.Generator().manual_seed(0))[:count]
    return Pairs("copy", drawn, drawn)


def _read_pairs(tokenizer: Tokenizer, path: Path) -> Pairs:
    """Read a relation.

    Raises:
        UserError: If the file cannot be read or has no pairs, or something in it is not one token.
    """
    with told_as(f"{path} cannot be read"), open(path, newline="", encoding="utf-8") as file:
        lines = [line for line in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE) if line]
    wrong = next((number for number, line in enumerate(lines, 1) if len(line) != 2), None)
    if wrong is not None or not lines:
        got = f"{path} holds nothing" if not lines else f"{path}: line {wrong} is no pair"
        raise UserError(f"{got}; accepted: lines of a token, a tabulator and its partner.")
    sources, targets = ([one_token(tokenizer, word) for word in column] for column in zip(*lines, strict=True))
    return Pairs(path.stem, torch.tensor(sources), torch.tensor(targets))


def _list(layer: str, head: int, tokenizer: Tokenizer, asked: Tensor, logits: Tensor, top: int) -> list[Written]:
    values, ids = logits.topk(min(top, logits.shape[1]))
    return [
        Written(layer, head, tokenizer.decode([source]), rank, tokenizer.decode([token]), value)
        for source, *row in zip(asked.tolist(), ids.tolist(), values.tolist(), strict=True)
        for rank, (token, value) in enumerate(zip(*row, strict=True), 1)
    ]


def _score(layer: str, head: int, pairs: Pairs, logits: Tensor, top: int) -> Score:
    own = logits.gather(1, pairs.targets.to(logits.device)[:, None])
    ranks = (logits >= own).sum(1).double()  # of equals the last: a head that writes nothing has no best token
    in_top, reciprocal = float((ranks <= top).double().mean()), float((1 / ranks).mean())
    return Score(layer, head, pairs.name, in_top, reciprocal, len(ranks))


def _best(scores: Sequence[Score], relation: str) -> list[Score]:
    of_relation = [score for score in scores if score.relation == relation]
    return sorted(of_relation, key=lambda score: -score.mean_reciprocal_rank)[:SHOWN]


def _tables(scores: Sequence[Score], top: int) -> Iterator[str]:
    for relation in dict.fromkeys(score.relation for score in scores):
        best = _best(scores, relation)
        lines = [
            [f"{score.layer} head {score.head}", f"{100 * score.in_top:.1f} %", f"{score.mean_reciprocal_rank:.3f}"]
            for score in best
        ]
        said = f"heads by {relation}, {best[0].tokens} tokens"
        yield markdown_table([said, f"partner among {top}", "mean reciprocal rank"], lines)


def _lists(written: Sequence[Written], scores: Sequence[Score]) -> Iterator[str]:
    """Write what the best heads of each relation write for each word."""
    for relation in dict.fromkeys(score.relation for score in scores) if written else ():
        best = _best(scores, relation)[0]
        rows: dict[str, list[str]] = {}
        for one in written:
            if (one.layer, one.head) == (best.layer, best.head):
                rows.setdefault(one.token, []).append(one.writes)
        lines = [[repr(token), " ".join(map(repr, writes))] for token, writes in rows.items()]
        yield markdown_table([f"{best.layer} head {best.head}, best by {relation}", "writes"], lines)
