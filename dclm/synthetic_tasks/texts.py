"""Texts of several examples in the authors' format: JSONL of `task_id` and `texts`, with answers in brackets.

The first two examples of a text are demonstrations; the answers of all others are in brackets and are scored. The third
answer has two shots before it, the eighth seven.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

from dctrain.errors import UserError, as_user_error
from dctrain.utils.files import atomic_write, check_regular

from .tasks import SUITE, TASKS, Cast, SyntheticTask

EXAMPLES = 8  # examples per text
SHOTS = 2  # examples before the first scored answer
TEXTS = 12  # texts per task
BRACKETS = re.compile(r"\[ ?([^\[\]\n]*?[^\[\]\s][^\[\]\n]*?) ?\]")


class TaskText(NamedTuple):
    """A text of a task: examples with scored answers in brackets."""

    task_id: str
    text: str

    def answers(self) -> Iterator[tuple[str, str, int]]:
        """Yield, for each scored answer, the text before it without brackets, the answer, and the number of preceding
        examples.

        The space before an answer is part of the answer, as in tokenizers.
        """
        before, stop = "", 0
        for match in BRACKETS.finditer(self.text):
            before += self.text[stop : match.start()]
            stop = match.end()
            bare = before.rstrip(" ")
            shots = max(0, sum(1 for line in bare.split("\n") if line.strip()) - 1)
            yield bare, before[len(bare) :] + match[1], shots
            before += match[1]


def make_text(task: SyntheticTask, random: Random, cast: Cast = SUITE) -> TaskText:
    """Sample a text of eight examples."""
    examples = [task.example(random, cast) for _ in range(EXAMPLES)]
    lines = [
        f"{question} {answer if number < SHOTS else f'[ {answer} ]'}"
        for number, (question, answer) in enumerate(examples)
    ]
    return TaskText(task.id, "\n" + "\n".join(lines) + "\n")


def make_suite(
    seed: int = 0, tasks: Sequence[SyntheticTask] = TASKS, count: int = TEXTS, cast: Cast = SUITE
) -> list[TaskText]:
    """Sample the suite: twelve texts of each of the 74 tasks, 888 in total."""
    return [make_text(task, Random(f"{seed} {task.id} {number}"), cast) for task in tasks for number in range(count)]


def write_texts(path: Path, texts: Iterable[TaskText]) -> None:
    """Write texts as JSONL."""
    with atomic_write(path) as file:
        for text in texts:
            file.write((json.dumps({"task_id": text.task_id, "texts": text.text}) + "\n").encode())


def read_texts(path: Path) -> list[TaskText]:
    """Read texts from JSONL.

    Raises:
        UserError: If the file cannot be read, a record is invalid, or there are no answers.
    """
    texts = []
    with as_user_error(f"{path} cannot be read"):
        lines = (
            check_regular(path).read_text(encoding="utf-8").split("\n")
        )  # JSON strings may contain other line separators
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        with as_user_error(f"{path}:{number} is not JSON"):
            record = json.loads(line)
        if not isinstance(record, dict) or not all(isinstance(record.get(key), str) for key in ("task_id", "texts")):
            raise UserError(f"{path}:{number} is not a text of a task: expected strings 'task_id' and 'texts'.")
        text = TaskText(record["task_id"], record["texts"])
        if not any(True for _ in text.answers()):
            raise UserError(f"{path}:{number} has no answer in brackets.")
        if re.search(r"[\[\]]", BRACKETS.sub("", text.text)):
            raise UserError(f"{path}:{number} has unmatched brackets.")
        texts.append(text)
    if not texts:
        raise UserError(f"{path} has no texts of tasks.")
    return texts
