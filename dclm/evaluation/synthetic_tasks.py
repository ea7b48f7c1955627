"""Evaluation of synthetic tasks (section 4.3): perplexity and accuracy of answers (table 5), by shots (figure 6)."""

import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from dctrain.data.dataset_cache import file_digest
from dctrain.evaluation.results import QUESTIONS, Measure

from ..likelihood import encode_pairs
from ..synthetic_tasks import TaskText, read_texts
from .measures import perplexity_of, standard_error
from .scorer import ContinuationScore, Scorer


class TaskAnswer(NamedTuple):
    """A scored answer.

    Attributes:
        task_id: Task of its text.
        shots: Number of examples before it.
        score: Score of the answer.
        num_tokens: Tokens of the answer.
    """

    task_id: str
    shots: int
    score: ContinuationScore
    num_tokens: int


class SuiteFile(NamedTuple):
    """Texts of synthetic tasks with answers in brackets.

    Brackets are removed, and each answer is scored given all preceding text. Accuracy counts answers whose tokens are
    all greedy; perplexity is per answer token.

    Attributes:
        name: Name in the table.
        path: JSONL of `task_id` and `texts`, in the authors' format, written by `dclm suite`.
        limit: Maximum number of texts.
    """

    name: str
    path: str
    limit: int | None

    @property
    def title(self) -> str:
        """Unique title."""
        return f"suite {self.path}"

    def settings(self, scorer: Scorer) -> dict:
        """Settings that the numbers depend on, other than the model."""
        digest = file_digest(Path(self.path))
        return {"limit": self.limit, "sha256": digest, "context_length": scorer.context_length}

    def run(self, scorer: Scorer) -> tuple[list[Measure], str | None]:
        """Score all answers; the note reports truncated texts.

        Raises:
            UserError: If the file is not a suite.
        """
        texts = read_texts(Path(self.path))[: self.limit]
        before = scorer.num_cut
        answers = _score(scorer, texts, self.name)
        measures = _measures(self.name, answers)
        for name, key, is_detail in (("{} shots", _shots, False), ("{}", _cell, True), ("task {}", _task, True)):
            groups: dict[object, list[TaskAnswer]] = defaultdict(list)
            for answer in answers:
                groups[key(answer)].append(answer)
            for group in sorted(group for group in groups if group is not None):
                measures += _measures(f"{self.name}: {name.format(group)}", groups[group], is_detail)
        return measures, scorer.tell_cut(before)


def _shots(answer: TaskAnswer) -> int:
    return answer.shots


def _task(answer: TaskAnswer) -> str:
    return answer.task_id


def _cell(answer: TaskAnswer) -> str | None:
    """Return pattern and transformation from a task's name, if it has them."""
    pattern, slash, rest = answer.task_id.partition("/")
    return f"{pattern} x {rest.partition('/')[0]}" if slash else None


def _score(scorer: Scorer, texts: Iterable[TaskText], described: str) -> list[TaskAnswer]:
    asked = [(text.task_id, shots, before, answer) for text in texts for before, answer, shots in text.answers()]
    pairs = encode_pairs(scorer.tokenizer, [(before, answer) for *_, before, answer in asked])
    scores = scorer.score(pairs, described)
    return [
        TaskAnswer(task_id, shots, score, len(target))
        for (task_id, shots, *_), score, (_, target) in zip(asked, scores, pairs, strict=True)
    ]


def _measures(name: str, answers: list[TaskAnswer], is_detail: bool = False) -> list[Measure]:
    """Return accuracy, with its standard error, and perplexity."""
    count = len(answers)
    accuracy = sum(answer.score.is_greedy for answer in answers) / count
    error = standard_error(accuracy, count)
    num_tokens = sum(answer.num_tokens for answer in answers)
    perplexity = perplexity_of(-math.fsum(answer.score.log_likelihood for answer in answers), num_tokens)
    return [
        Measure(name, "exact_match", accuracy, error, True, count, QUESTIONS, is_detail),
        Measure(name, "perplexity", perplexity, None, False, num_tokens, "tokens", is_detail),
    ]
