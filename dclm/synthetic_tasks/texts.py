"""Texts of several examples, as the authors' files hold them: a JSONL of `task_id` and `texts`, answers in brackets.

The first two examples of a text are shown; of each other the answer stands in brackets and counts. So the third answer
has two shots before it, and the eighth seven.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

from dctrain.errors import UserError, as_user_error
from dctrain.utils.files import atomic_write, check_regular

from .tasks import SUITE, TASKS, Cast, Task

EXAMPLES = 8  # in a text
SHOTS = 2  # of them that come before the first answer that counts
TEXTS = 12  # of a task
BRACKETS = re.compile(r"\[ ?([^\[\]\n]*?[^\[\]\s][^\[\]\n]*?) ?\]")


class TaskText(NamedTuple):
    """A text of a task: examples whose answers stand in brackets where they count."""

    task_id: str
    text: str

    def answers(self) -> Iterator[tuple[str, str, int]]:
        """Yield of each answer that counts what stands before it, brackets left out, the answer, and the number of
        examples before.

        The space before an answer belongs to the answer, as tokenizers have it.
        """
        before, stop = "", 0
        for match in BRACKETS.finditer(self.text):
            before += self.text[stop : match.start()]
            stop = match.end()
            bare = before.rstrip(" ")
            shots = max(0, sum(1 for line in bare.split("\n") if line.strip()) - 1)
            yield bare, before[len(bare) :] + match[1], shots
            before += match[1]


def make_text(task: Task, random: Random, cast: Cast = SUITE) -> TaskText:
    """Draw a text of eight examples."""
    examples = [task.example(random, cast) for _ in range(EXAMPLES)]
    lines = [
        f"{question} {answer if number < SHOTS else f'[ {answer} ]'}"
        for number, (question, answer) in enumerate(examples)
    ]
    return TaskText(task.id, "\n" + "\n".join(lines) + "\n")


def make_suite(seed: int = 0, tasks: Sequence[Task] = TASKS, count: int = TEXTS, cast: Cast = SUITE) -> list[TaskText]:
    """Draw the suite: twelve texts of each of the 74 tasks, 888 in all."""
    return [make_text(task, Random(f"{seed} {task.id} {number}"), cast) for task in tasks for number in range(count)]


def write_texts(path: Path, texts: Iterable[TaskText]) -> None:
    """Write texts as JSONL."""
    with atomic_write(path) as file:
        for text in texts:
            file.write((json.dumps({"task_id": text.task_id, "texts": text.text}) + "\n").encode())


def read_texts(path: Path) -> list[TaskText]:
    """Read texts from JSONL.

    Raises:
        UserError: If the file cannot be read, a record is no text of a task, or none has an answer.
    """
    texts = []
    with as_user_error(f"{path} cannot be read"):
        lines = check_regular(path).read_text(encoding="utf-8").split("\n")  # JSON may hold other ends of lines
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        with as_user_error(f"{path}:{number} is no JSON"):
            record = json.loads(line)
        if not isinstance(record, dict) or not all(isinstance(record.get(key), str) for key in ("task_id", "texts")):
            raise UserError(f"{path}:{number} is no text of a task: it needs strings 'task_id' and 'texts'.")
        text = TaskText(record["task_id"], record["texts"])
        if not any(True for _ in text.answers()):
            raise UserError(f"{path}:{number} has no answer in brackets.")
        if re.search(r"[\[\]]", BRACKETS.sub("", text.text)):
            raise UserError(f"{path}:{number} has a bracket that is none of an answer's.")
        texts.append(text)
    if not texts:
        raise UserError(f"{path} holds no text of a task.")
    return texts
