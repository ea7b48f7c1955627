"""The suite as training data: an endless row of texts, each a function of its number, some combinations held out.

It is made easier than the suite, so that minutes suffice: eight names, two people, the first wording, four patterns.
"""

from functools import cache, cached_property
from random import Random
from typing import NamedTuple

import numpy as np
from torch.utils.data import Dataset

from dctrain.data.sampler import SampleRef
from dctrain.errors import UserError

from ..data.samples import Sample
from ..data.tokenizers import END_TOKENS, SubwordTokenizer
from ..loss import IGNORED
from . import words
from .tasks import TASKS, Cast, Task

NAME = "tasks"  # what `data.tokens` calls it
ENDLESS = 2**31  # texts of the training split
HELD_OUT = {  # pattern and transformation that training never shows together; each of both it does
    ("same-person", "country"),
    ("same-person", "next"),
    ("different-in-set", "capability"),
    ("different-in-set", "opposite"),
}
SHUNNED = "the-other-person"  # its attention is the contrary of same-person's: early on their gradients cancel
DRAWN_TASKS = tuple(task for task in TASKS if task.wording == 0 and task.pattern != SHUNNED)
TRAINED = tuple(task for task in DRAWN_TASKS if (task.pattern, task.transformation) not in HELD_OUT)
UNSEEN = tuple(task for task in DRAWN_TASKS if (task.pattern, task.transformation) in HELD_OUT)
CAST = Cast(words.NAMES[:8], 2)
EXAMPLES = 40  # of each task, which show the words of its sentences


@cache
def task_tokenizer() -> SubwordTokenizer:
    """Make a tokenizer of which every word of the suite, every sign and the end of a line is one token."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    split = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split(Regex(r"\n|\w+|[^\w\s]"), "isolated")]
    )
    known = set(words.ALL_WORDS) | {"\n"}
    for task in TASKS:
        for number in range(EXAMPLES):
            question, answer = task.example(Random(number))
            known.update(word for word, _ in split.pre_tokenize_str(f"{question} {answer}"))
    vocabulary = {word: number for number, word in enumerate([END_TOKENS[0], *sorted(known)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=END_TOKENS[0]))
    tokenizer.pre_tokenizer = split
    return SubwordTokenizer(tokenizer.to_str())


class EncodedText(NamedTuple):
    """A text as tokens, and which of them are answers."""

    ids: np.ndarray
    is_answer: np.ndarray


def encoded_text(task: Task, random: Random, num_tokens: int) -> EncodedText:
    """Draw as many examples of a task as fit into a number of tokens, the rest filled with ends of a text.

    Every answer is one token, and counts.
    """
    tokenizer = task_tokenizer()
    ids = np.full(num_tokens, tokenizer.eos_id, dtype=np.int64)
    is_answer = np.zeros(num_tokens, dtype=bool)
    at = 1  # an end of a text begins it
    while True:
        question, answer = task.example(random, CAST)
        (row,) = tokenizer.encode([f"{question} {answer}\n"])
        if at + len(row) > num_tokens:
            return EncodedText(ids, is_answer)
        ids[at : at + len(row)] = row
        at += len(row)
        is_answer[at - 2] = True  # before the end of the line


class TaskTexts(Dataset):
    """Texts of tasks drawn one by one: number i is a function of the split and of i.

    Args:
        tasks: Those that are drawn.
        split: Sets train and val apart.
        context_length: Tokens T of a text.

    Raises:
        UserError: If not one example fits.
    """

    def __init__(self, tasks: tuple[Task, ...], split: str, context_length: int) -> None:
        self.tasks, self.split, self.context_length = tasks, split, context_length
        for task in tasks:
            if not encoded_text(task, Random(0), context_length + 1).is_answer.any():
                raise UserError(f"data.context_length={context_length} is too short for an example of {task.id}.")

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, ref: SampleRef) -> Sample:
        random = Random(f"{self.split} {ref.index}")
        ids, is_answer = encoded_text(random.choice(self.tasks), random, self.context_length + 1)
        return Sample(ref, ids[:-1], np.where(is_answer, ids, IGNORED)[1:])


class TaskStream:
    """What `TokenDataModule` asks of a corpus, of texts that are drawn."""

    folder = NAME

    @property
    def vocab_size(self) -> int:
        """Words, signs and the end of a text."""
        return task_tokenizer().vocab_size

    @cached_property
    def eos(self) -> str:
        """What ends a text."""
        return task_tokenizer().eos_token

    def tokenizer(self) -> SubwordTokenizer:
        """Return the tokenizer."""
        return task_tokenizer()

    def texts(self, split: str, context_length: int) -> TaskTexts:
        """Return the texts of a split: "train" and "val" have the trained combinations, "unseen" the others."""
        return TaskTexts(UNSEEN if split == "unseen" else TRAINED, split, context_length)
