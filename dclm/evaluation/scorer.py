"""Scorer: scores and generates texts with one model, in batches, distributed over ranks, with cached answers."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import NamedTuple

import torch
from torch import nn
from tqdm import tqdm

from dctrain.errors import UserError, as_user_error
from dctrain.evaluation.answer_cache import AnswerCache, digest
from dctrain.evaluation.ranks import EvaluationRanks

from ..data.masking import Masked
from ..generate import check_prompts, stream
from ..likelihood import Pair, batches, cut_left, score, score_masked
from ..load import LoadedModel
from ..loss import Likelihood
from ..sampling import Sampling
from ..stop_strings import StopStringBuffer


class ContinuationScore(NamedTuple):
    """Log-likelihood of a continuation in nats, and whether all its tokens are greedy."""

    log_likelihood: float
    is_greedy: bool


class MaskedScore(NamedTuple):
    """Log-likelihood of a text's masked tokens in nats, number of correct predictions, and number of tokens."""

    log_likelihood: float
    num_right: int
    count: int


class Prompt(NamedTuple):
    """Tokens of a prompt, and settings of its generation."""

    tokens: tuple[int, ...]
    max_new_tokens: int
    stop_strings: tuple[str, ...]
    sampling: Sampling


class Scorer:
    """Scorer of one model.

    Args:
        model: The model.
        ranks: Ranks that share the work.
        journal: Cache of answers.
        batch_size: Texts per batch.
        context_length: Maximum tokens per sequence; longer texts are truncated on the left.

    Attributes:
        num_cut: Number of truncated texts so far.
        conditions: Conditions that answers depend on, such as disabled parts.
    """

    def __init__(
        self, model: LoadedModel, ranks: EvaluationRanks, journal: AnswerCache, batch_size: int, context_length: int
    ) -> None:
        self.decoder, self.tokenizer = model
        self.ranks, self.journal, self.batch_size, self.context_length = ranks, journal, batch_size, context_length
        self.num_cut, self.conditions = 0, ()

    @property
    def module(self) -> nn.Module:
        """The model."""
        return self.decoder

    def under(self, condition: str) -> "Scorer":
        """Return a scorer whose answers are cached separately for a condition."""
        scorer = copy(self)
        scorer.conditions = (*self.conditions, condition)
        return scorer

    def tell_cut(self, before: int) -> str | None:
        """Describe the texts truncated since there were `before` of them; None if there are none."""
        if self.num_cut == before:
            return None
        return f"{self.num_cut - before} texts longer than {self.context_length} tokens were truncated on the left"

    def score(self, pairs: Sequence[Pair], described: str | None = None) -> list[ContinuationScore]:
        """Score continuations.

        Args:
            pairs: Token ids of contexts and continuations.
            described: Text of the progress bar; None for no bar.

        Raises:
            UserError: If a continuation is longer than the context.
        """
        with as_user_error(of=ValueError):
            cut = [cut_left(pair, self.context_length) for pair in pairs]
        self.num_cut += sum(len(now[0]) < len(pair[0]) for now, pair in zip(cut, pairs, strict=True))
        keys = [digest("score", *map(_numbers, pair), *self.conditions) for pair in cut]
        todo = {key: pair for key, pair in zip(keys, cut, strict=True) if key not in self.journal.known}
        names, asked = list(todo), list(todo.values())
        with as_user_error(of=ValueError):
            work = batches(self.decoder, asked, self.batch_size)[self.ranks.rank :: self.ranks.size]

        def answer(batch: list) -> dict:
            with torch.inference_mode():
                found = {names[number]: _summed(likelihood) for number, likelihood in score(self.decoder, batch)}
            return _without_nan(found)

        self._work_through(work, answer, described)
        return [ContinuationScore(*self.journal.known[key]) for key in keys]

    def score_masked(self, texts: Sequence[Masked], described: str | None = None) -> list[MaskedScore]:
        """Score the masked tokens of texts of any lengths up to the context; `described` as in `score`."""
        keys = [digest("masked", _numbers(text.input_ids), _numbers(text.targets), *self.conditions) for text in texts]
        todo = {key: text for key, text in zip(keys, texts, strict=True) if key not in self.journal.known}
        names = sorted(todo, key=lambda key: -len(todo[key].input_ids))
        starts = range(0, len(names), self.batch_size)
        work = [names[start : start + self.batch_size] for start in starts][self.ranks.rank :: self.ranks.size]

        def answer(batch: list[str]) -> dict:
            found = score_masked(self.decoder, [todo[name] for name in batch])
            return _without_nan({name: _of_masked(likelihood) for name, likelihood in zip(batch, found, strict=True)})

        self._work_through(work, answer, described)
        return [MaskedScore(*self.journal.known[key]) for key in keys]

    def complete(self, prompts: Sequence[Prompt], described: str | None = None) -> list[str]:
        """Generate continuations up to the first stop string or end token; arguments as in `score`.

        Sampled texts depend on their prompt and its number of repetitions, not on the rest of the batch.

        Raises:
            UserError: If a continuation exceeds the context.
        """
        prompts = [self._cut_prompt(prompt) for prompt in prompts]
        seen: Counter[Prompt] = Counter()
        keys = []
        for prompt in prompts:
            turn = seen[prompt] if prompt.sampling.temperature > 0 else 0
            seen[prompt] += 1
            keys.append(digest("complete", *prompt[:-1], *vars(prompt.sampling).values(), turn, *self.conditions))
        todo = {key: prompt for key, prompt in zip(keys, prompts, strict=True) if key not in self.journal.known}
        work = self._alike(todo)[self.ranks.rank :: self.ranks.size]
        self._work_through(work, self._complete_batch, described)
        return [self.journal.known[key] for key in keys]

    def _work_through(self, work: Iterable, answer: Callable[[list], dict], described: str | None) -> None:
        """Answer this rank's batches, cache each answer, and exchange answers."""
        answers: dict = {}
        hidden = described is None or not self.ranks.is_first
        for batch in tqdm(work, described, unit="batch", disable=hidden, leave=False):
            found = answer(batch)
            self.journal.add(found)
            answers |= found
        self.journal.share(answers)

    def _cut_prompt(self, prompt: Prompt) -> Prompt:
        room = self.context_length - prompt.max_new_tokens
        if room < 1:
            raise UserError(f"{prompt.max_new_tokens} new tokens do not fit into a context of {self.context_length}.")
        self.num_cut += len(prompt.tokens) > room
        return prompt._replace(tokens=prompt.tokens[-room:])

    def _alike(self, todo: dict[str, Prompt]) -> list[list[tuple[str, Prompt]]]:
        """Group prompts with the same settings into batches, longest first; sampled ones individually."""
        ways: dict[tuple, list[tuple[str, Prompt]]] = {}
        for key, prompt in sorted(todo.items(), key=lambda item: -len(item[1].tokens)):
            ways.setdefault(prompt[1:], []).append((key, prompt))
        found = []
        for (_, _, sampling), items in ways.items():
            size = self.batch_size if sampling.temperature == 0 else 1
            found += [items[start : start + size] for start in range(0, len(items), size)]
        return found

    def _complete_batch(self, batch: list[tuple[str, Prompt]]) -> dict[str, str]:
        _, max_new_tokens, stop_strings, sampling = batch[0][1]
        texts = [StopStringBuffer(self.tokenizer, [self.tokenizer.eos_id], stop_strings) for _ in batch]
        written: list[list[int]] = [[] for _ in batch]

        def watch(tokens: list[int]) -> list[bool]:
            for row, token in enumerate(tokens):
                if not texts[row].is_ended:
                    texts[row].add(token)
                    written[row] += [token] if token != self.tokenizer.eos_id else []
            return [text.is_ended for text in texts]

        with as_user_error(of=ValueError):
            ids = check_prompts(self.decoder, [prompt.tokens for _, prompt in batch], max_new_tokens)
            seed = int(batch[0][0][:12], 16)
            for _ in stream(self.decoder, ids, max_new_tokens, sampling, watch=watch, seed=seed):
                pass
        return {key: self._text(tokens, stop_strings) for (key, _), tokens in zip(batch, written, strict=True)}

    def _text(self, tokens: list[int], stop_strings: Sequence[str]) -> str:
        """Decode all tokens together, as the harness does, so that truncated characters are visible."""
        text = self.tokenizer.decode(tokens)
        for stop in stop_strings:
            text = text.split(stop)[0]
        return text


def _numbers(ids: Sequence[int]) -> list[int]:
    return [int(number) for number in ids]


def _summed(found: Likelihood) -> list:
    return [found.log_likelihoods.double().sum().item(), bool(found.is_greedy.all())]


def _without_nan(scores: dict[str, list]) -> dict[str, list]:
    if any(math.isnan(log_likelihood) for log_likelihood, *_ in scores.values()):
        raise UserError("the log-likelihoods are NaN: the weights are damaged or too large for their dtype.")
    return scores


def _of_masked(found: Likelihood) -> list:
    return [found.log_likelihoods.double().sum().item(), int(found.is_greedy.sum()), len(found.is_greedy)]
