"""Tasks of the lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness): its data, prompts and
metrics, answered by a `Scorer`. What it asks is tokenised as its own Hugging Face model does it.
"""

import difflib
import logging
import math
from collections.abc import Sequence
from contextlib import redirect_stdout
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager

from dctrain.errors import UserError, as_user_error
from dctrain.evaluation.answer_cache import digest
from dctrain.evaluation.results import QUESTIONS, Measure

from ..likelihood import encode_pairs
from ..sampling import Sampling
from .measures import windows
from .scorer import Prompt, Scorer

MAX_NEW_TOKENS = 256  # the harness's own default
BOOTSTRAPS = 1000  # for standard errors that have no formula
ACCEPTED = ("until", "do_sample", "temperature", "top_k", "top_p", "max_gen_toks")


class Task(NamedTuple):
    """A task, group or tag of the harness.

    Attributes:
        task: Its name.
        num_fewshot: Examples before each question; None for the task's own number. One that says 0 itself keeps it.
        limit: Only this many questions.
        manager: Knows all tasks.
    """

    task: str
    num_fewshot: int | None
    limit: int | None
    manager: TaskManager

    @property
    def title(self) -> str:
        """Name the measure, uniquely."""
        return f"task {self.task}" + ("" if self.num_fewshot is None else f", {self.num_fewshot}-shot")

    def settings(self, scorer: Scorer) -> dict:
        """Tell what the numbers depend on beside the model."""
        return {
            "task": self.task,
            "num_fewshot": self.num_fewshot,
            "limit": self.limit,
            "context_length": scorer.context_length,
            "lm_eval": version("lm_eval"),
            "content": _content(self.manager, self.task),
        }

    def run(self, scorer: Scorer) -> tuple[list[Measure], str | None]:
        """Ask all questions; the note tells of those that lost their beginning.

        Raises:
            UserError: If the task or its data cannot be loaded.
        """
        loaded = _load(self.manager, self.task)
        group, before = loaded["groups"].get(self.task), scorer.num_cut
        with redirect_stdout(None):  # the harness tells of its bootstraps there
            found = lm_eval.simple_evaluate(
                Model(scorer, self.title),
                tasks=list(loaded["tasks"].values()) if group is None else [group],
                num_fewshot=self.num_fewshot,
                limit=self.limit,
                bootstrap_iters=BOOTSTRAPS,
                log_samples=False,
                task_manager=self.manager,
            )
        return _measures(found) if scorer.ranks.is_first else [], scorer.tell_cut(before)


def _load(manager: TaskManager, task: str) -> dict:
    with as_user_error(f"task {task}: its file or its data cannot be loaded"):
        return manager.load([task])


@cache
def _content(manager: TaskManager, task: str) -> str:
    """Sum up the settings and the data of a task, or of all tasks of a group."""
    parts = []
    for name, leaf in sorted(_load(manager, task)["tasks"].items()):
        splits = leaf.dataset.items() if isinstance(leaf.dataset, dict) else []
        data = {split: getattr(rows, "_fingerprint", len(rows)) for split, rows in splits}
        parts.append((name, repr(sorted(leaf.dump_config().items(), key=str)), data))
    return digest(*parts)


def find_tasks(names: Sequence[str], num_fewshot: Sequence[int], limit: int | None, folder: str | None) -> list[Task]:
    """Find tasks by name.

    Args:
        names: Of tasks, groups or tags.
        num_fewshot: Numbers of examples; each task is asked with each, or with its own if there is none.
        limit: Only this many questions.
        folder: Where task files of one's own lie, beside the harness's.

    Raises:
        UserError: If a name is unknown, or the folder is none.
    """
    if folder is not None and not Path(folder).is_dir():
        raise UserError(f"task_folder={folder} is no folder.")
    manager = _know_tasks(None if folder is None else str(Path(folder).resolve()))
    for name in names:
        if name not in manager.task_index:
            near = difflib.get_close_matches(name, manager.all_tasks, 5)
            hint = f"; near it are {', '.join(near)}" if near else ""
            raise UserError(f"task {name!r} is unknown to the lm-evaluation-harness {version('lm_eval')}{hint}.")
    return [Task(name, shots, limit, manager) for shots in num_fewshot or (None,) for name in names]


@cache
def _know_tasks(folder: str | None) -> TaskManager:
    """Read all task files, which takes seconds."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    return TaskManager(include_path=folder)


class Model(LM):
    """The harness's view of a model.

    Args:
        scorer: Answers.
        described: What its progress bars say.
    """

    def __init__(self, scorer: Scorer, described: str) -> None:
        super().__init__()
        self.scorer, self.described = scorer, described

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Score continuations of contexts."""
        pairs = encode_pairs(self.scorer.tokenizer, [request.args for request in requests])
        with as_user_error(of=ValueError):
            return [tuple(score) for score in self.scorer.score(pairs, self.described)]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Score whole texts, in disjoint windows."""
        tokenizer, length = self.scorer.tokenizer, self.scorer.context_length
        begin = tokenizer.begin_ids or [tokenizer.eos_id]
        rows = tokenizer.encode([request.args[0] for request in requests])
        pairs = [list(windows(row.tolist(), begin, length, length)) for row in rows]
        scores = iter(self.scorer.score([pair for row in pairs for pair in row], self.described))
        return [math.fsum(next(scores).log_likelihood for _ in row) for row in pairs]

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Continue contexts until a stop string."""
        tokenizer = self.scorer.tokenizer
        rows = tokenizer.encode([request.args[0] for request in requests])
        prompts = [
            _prompt((*tokenizer.begin_ids, *row.tolist()) or (tokenizer.eos_id,), request.args[1])
            for row, request in zip(rows, requests, strict=True)
        ]
        return self.scorer.complete(prompts, self.described)


def _prompt(tokens: tuple[int, ...], options: dict) -> Prompt:
    """Read how a task wants a text continued, as the harness's own models do."""
    given = normalize_gen_kwargs({key: value for key, value in options.items() if value is not None}, MAX_NEW_TOKENS)
    unknown = sorted(set(given) - set(ACCEPTED))
    if unknown:
        raise UserError(f"the task generates with {unknown}; expected {', '.join(ACCEPTED)}.")
    until = given.get("until") or []
    stops = (until,) if isinstance(until, str) else tuple(text for text in until if text)
    temperature = given.get("temperature", 1.0) if given.get("do_sample") else 0.0
    with as_user_error("the task's generation_kwargs"):
        sampling = Sampling(float(temperature), given.get("top_k") or None, given.get("top_p"))
    return Prompt(tokens, int(given["max_gen_toks"]), stops, sampling)


def _measures(found: dict) -> list[Measure]:
    """Read the harness's results: of tasks, and of the groups that sum them up."""
    measures = []
    groups = found.get("groups", {})
    for name, values in {**found["results"], **groups}.items():
        shots = found["n-shot"].get(name)
        label = name if shots is None else f"{name}, {shots}-shot"
        count = found["n-samples"].get(name, {}).get("effective", 0)
        for key, value in values.items():
            metric, _, way = key.partition(",")
            if not way or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = values.get(f"{metric}_stderr,{way}")
            stderr = float(stderr) if isinstance(stderr, int | float) else None
            higher = bool(found["higher_is_better"].get(name, {}).get(metric, True))
            metric = metric if way == "none" else f"{metric} ({way})"
            unit = "questions of a group" if name in groups else QUESTIONS
            measures.append(Measure(label, metric, float(value), stderr, higher, count, unit))
    return measures
