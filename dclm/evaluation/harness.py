"""Tasks of the lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness).

Data, prompts and metrics are the harness's, answers come from a `Scorer`, and texts are tokenized as by the harness's
Hugging Face model.
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

MAX_NEW_TOKENS = 256  # the harness's default
BOOTSTRAPS = 1000  # for standard errors without a formula
ACCEPTED = ("until", "do_sample", "temperature", "top_k", "top_p", "max_gen_toks")


class Task(NamedTuple):
    """A task, group or tag of the harness.

    Attributes:
        task: Name of the task.
        num_fewshot: Examples before each question; None for the task's default. Tasks defined with 0 keep 0.
        limit: Maximum number of questions.
        manager: Task manager of the harness.
    """

    task: str
    num_fewshot: int | None
    limit: int | None
    manager: TaskManager

    @property
    def title(self) -> str:
        """Unique title."""
        return f"task {self.task}" + ("" if self.num_fewshot is None else f", {self.num_fewshot}-shot")

    def settings(self, scorer: Scorer) -> dict:
        """Settings that the numbers depend on, other than the model."""
        return {
            "task": self.task,
            "num_fewshot": self.num_fewshot,
            "limit": self.limit,
            "context_length": scorer.context_length,
            "lm_eval": version("lm_eval"),
            "content": _content(self.manager, self.task),
        }

    def run(self, scorer: Scorer) -> tuple[list[Measure], str | None]:
        """Evaluate all questions; the note reports truncated ones.

        Raises:
            UserError: If the task or its data cannot be loaded.
        """
        loaded = _load(self.manager, self.task)
        group, before = loaded["groups"].get(self.task), scorer.num_cut
        with redirect_stdout(None):  # the harness prints its bootstraps
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
    with as_user_error(f"task {task}: cannot load its file or data"):
        return manager.load([task])


@cache
def _content(manager: TaskManager, task: str) -> str:
    """Hash of the settings and the data of a task, or of all tasks of a group."""
    parts = []
    for name, leaf in sorted(_load(manager, task)["tasks"].items()):
        splits = leaf.dataset.items() if isinstance(leaf.dataset, dict) else []
        data = {split: getattr(rows, "_fingerprint", len(rows)) for split, rows in splits}
        parts.append((name, repr(sorted(leaf.dump_config().items(), key=str)), data))
    return digest(*parts)


def find_tasks(names: Sequence[str], num_fewshot: Sequence[int], limit: int | None, folder: str | None) -> list[Task]:
    """Find tasks by name.

    Args:
        names: Names of tasks, groups or tags.
        num_fewshot: Numbers of examples; each task is evaluated with each, or with its default if empty.
        limit: Maximum number of questions.
        folder: Folder of additional task files.

    Raises:
        UserError: If a name is unknown, or the folder does not exist.
    """
    if folder is not None and not Path(folder).is_dir():
        raise UserError(f"task_folder={folder} is not a folder.")
    manager = _know_tasks(None if folder is None else str(Path(folder).resolve()))
    for name in names:
        if name not in manager.task_index:
            near = difflib.get_close_matches(name, manager.all_tasks, 5)
            hint = f"; similar names: {', '.join(near)}" if near else ""
            raise UserError(f"task {name!r} is unknown to the lm-evaluation-harness {version('lm_eval')}{hint}.")
    return [Task(name, shots, limit, manager) for shots in num_fewshot or (None,) for name in names]


@cache
def _know_tasks(folder: str | None) -> TaskManager:
    """Read all task files, which takes several seconds."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    return TaskManager(include_path=folder)


class Model(LM):
    """A model for the harness.

    Args:
        scorer: Scorer of the model.
        described: Text of its progress bars.
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
        """Score full texts, in disjoint windows."""
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
    """Convert a task's generation settings as the harness's models do."""
    given = normalize_gen_kwargs({key: value for key, value in options.items() if value is not None}, MAX_NEW_TOKENS)
    unknown = sorted(set(given) - set(ACCEPTED))
    if unknown:
        raise UserError(f"the task has generation settings {unknown}; expected {', '.join(ACCEPTED)}.")
    until = given.get("until") or []
    stops = (until,) if isinstance(until, str) else tuple(text for text in until if text)
    temperature = given.get("temperature", 1.0) if given.get("do_sample") else 0.0
    with as_user_error("the task's generation_kwargs"):
        sampling = Sampling(float(temperature), given.get("top_k") or None, given.get("top_p"))
    return Prompt(tokens, int(given["max_gen_toks"]), stops, sampling)


def _measures(found: dict) -> list[Measure]:
    """Convert the harness's results of tasks and groups."""
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
