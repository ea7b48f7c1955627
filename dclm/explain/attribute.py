"""`dclm explain attribute`: attribution of predictions to branches, heads and tokens by integrated gradients."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from dctrain.checkpointing.checkpoint import make_folder
from dctrain.errors import UserError, as_user_error
from dctrain.evaluation.run import check_at_least_one, check_steps, find_dtype
from dctrain.explain.attribution import AttributionSettings, PartSet, kinds_of
from dctrain.explain.attribution_report import explain_attribution
from dctrain.explain.explanation import Explanation, origin_of, write_explanation
from dctrain.explain.selectors import check_kinds

from ..data.texts import find_inputs, gathered, read_documents
from ..decoder import Decoder
from ..evaluation.measures import PILE_KEY, text_windows
from ..likelihood import Pair, Text, arrange, batches, cut_left, encode_pairs
from ..load import LoadedModel, load_model
from ..loss import token_loss
from ..synthetic_tasks import read_texts
from .prompts import Question, ask

KINDS = ("branches", "heads", "tokens")


def attribute(
    checkpoint: str,
    prompt: str | None = None,
    target: str | None = None,
    texts: str | None = None,
    suite: str | None = None,
    over: Sequence[str] = (),
    alone: bool = False,
    steps: int = 64,
    limit: int | None = None,
    out: str = "attribution",
    text_key: str = "text",
    tokenizer: str | None = None,
    batch_size: int = 8,
    device: str = "cpu",
    dtype: str | None = None,
) -> None:
    """Attribute the log-probability of tokens to branches of the compositions, to heads, and to previous tokens.

    Integrated gradients (Sundararajan et al., 2017; paper, section 4.3): all parts are scaled together from 0 to 1;
    token embeddings from that of the end-of-text token to their own. The scalar is the log-probability of the token
    after a prompt, or the mean over all tokens of texts, or over the answers of synthetic tasks. Each kind needs two
    forward passes, and `steps` forward and backward passes.

    Args:
        checkpoint: A model, as in `generate`.
        prompt: The text before the target.
        target: The token after the prompt; default: the predicted token.
        texts: A file or folder of texts, in place of a prompt.
        suite: A file (JSONL) of synthetic tasks, written by `dclm suite`, in place of a prompt.
        over: Kinds of parts, attributed separately: "branches", "heads", and for a prompt "tokens". Default: all.
        alone: Also disable each part separately, one forward pass each, and report the rank correlation.
        steps: Integration points; the integration error is reported.
        limit: Maximum number of documents of the texts, the first ones, or of texts of the suite, sampled from all.
        out: Folder for attribution.csv, attribution-sums.csv, attribution.json and attribution.png.
        text_key: Key of the text in records.
        tokenizer: "bytes", a tokenizer.json or a hub name; default: the tokenizer of the checkpoint or folder.
        batch_size: Texts per batch.
        device: Device, such as cuda.
        dtype: "float32", "bfloat16" or "float16"; default: the dtype of the weights.

    Raises:
        UserError: If the model cannot be read or has no such parts, the target is not a single token, or not exactly
            one of prompt, texts and suite is given.
    """
    asked = locals().copy()
    _check_asked(prompt, texts, suite, target)
    kinds = KINDS if prompt is not None else KINDS[:2]
    if over:
        check_kinds("over", over, kinds)
    check_steps(steps)
    check_at_least_one(limit=limit, batch_size=batch_size)
    folder = make_folder(out)
    model = load_model(checkpoint, tokenizer, dtype=find_dtype(dtype), device=device)
    credits = AttributionSettings(over or kinds_of(model.decoder, kinds), steps, alone)
    if prompt is not None:
        found = attribution_of(model, ask(model, prompt, target), credits)
    else:
        pairs = _answers(model, suite, limit) if suite is not None else _windows(model, texts, text_key, limit)
        found = _mean_attribution(model, pairs, Path(suite or texts).name, credits, batch_size)
    write_explanation(found, folder, [origin_of(checkpoint, model.decoder)], asked)


def attribution_of(model: LoadedModel, question: Question, credits: AttributionSettings) -> Explanation:
    """Attribute the log-probability of a token.

    Raises:
        UserError: If the model has no such parts.
    """
    decoder = model.decoder.requires_grad_(False)

    def objective() -> Tensor:
        return decoder(question.input_ids)[0, -1].float().log_softmax(-1)[question.target]

    what = f"log-probability of {question.words[-1]!r} after {question.prompt[-60:]!r}"
    makers = {"tokens": lambda: _token_parts(model, question)}
    return explain_attribution(credits.attribute(decoder, [objective], makers), what)


def _check_asked(prompt: str | None, texts: str | None, suite: str | None, target: str | None) -> None:
    given = {"prompt": prompt, "texts": texts, "suite": suite}
    if sum(value is not None for value in given.values()) != 1:
        names = [name for name, value in given.items() if value is not None]
        raise UserError(f"{' and '.join(names) or 'nothing'} given; expected one of {', '.join(given)}.")
    if target is not None and prompt is None:
        raise UserError(f"target={target!r} requires a prompt.")


def _answers(model: LoadedModel, suite: str, limit: int | None) -> list[Pair]:
    """Encode the answers of some texts of a suite with their contexts."""
    found = read_texts(Path(suite))
    chosen = found if limit is None or limit >= len(found) else Random(0).sample(found, limit)
    asked = [(before, answer) for text in chosen for before, answer, _ in text.answers()]
    pairs = encode_pairs(model.tokenizer, asked)
    with as_user_error(suite, ValueError):
        return [cut_left(pair, model.decoder.config.context_length) for pair in pairs]


def _windows(model: LoadedModel, path: str, text_key: str, limit: int | None) -> list[Pair]:
    """Split texts into windows of the context length.

    Raises:
        UserError: If there are none.
    """
    length = model.decoder.config.context_length
    documents = (one for file in find_inputs([Path(path)]) for one in read_documents(file, text_key, PILE_KEY))
    texts, skipped = [], 0
    for readable, unreadable in gathered(islice(documents, limit)):
        texts += [one.text for one in readable]
        skipped += unreadable
    if skipped:
        print(f"skipped {skipped} files that are not UTF-8")
    pairs = [pair for row in text_windows(model.tokenizer, texts, length, length) for pair in row]
    if not pairs:
        raise UserError(f"texts={path} has no text.")
    return pairs


def _mean_attribution(
    model: LoadedModel, pairs: list[Pair], name: str, credits: AttributionSettings, batch_size: int
) -> Explanation:
    """Attribute the mean log-probability per token of continuations."""
    decoder = model.decoder.requires_grad_(False)
    with as_user_error(name, ValueError):
        texts = batches(decoder, pairs, batch_size)
    count = sum(len(continuation) for _, continuation in pairs)
    objectives = [partial(_share_of_mean, decoder, batch, count) for batch in texts]
    found = credits.attribute(decoder, objectives, {})
    return explain_attribution(found, f"mean log-probability of {count} tokens of {name}")


def _share_of_mean(decoder: Decoder, batch: list[Text], count: int) -> Tensor:
    """Sum of the log-probabilities of a batch's continuations, divided by `count`, the tokens of all batches."""
    ids, places, targets = arrange(decoder, batch)
    hidden = decoder.hidden_states(ids)[places]
    return -token_loss(hidden[None], decoder.output.weight, targets[None]) * (len(targets) / count)


def _token_parts(model: LoadedModel, question: Question) -> PartSet:
    """Return the tokens of a prompt, interpolated from the embedding of the end-of-text token."""
    decoder = model.decoder
    baseline = decoder.embed.weight[model.tokenizer.eos_id]

    @contextmanager
    def scaled(factors: Tensor) -> Iterator[None]:
        def fade(_module, _args, embedded: Tensor) -> Tensor:
            return torch.lerp(baseline.expand_as(embedded), embedded, factors[:, None].to(embedded.dtype))

        hook = decoder.embed.register_forward_hook(fade)
        try:
            yield
        finally:
            hook.remove()

    names = tuple(question.words[:-1])
    return PartSet("tokens", ("",) * len(names), names, scaled)
