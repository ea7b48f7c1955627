"""Synthetic tasks as training data: an endless sequence of texts, with some combinations held out.

They are easier than the suite, so that training takes minutes: eight names, two people, the first wording, four
patterns.
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
from .tasks import TASKS, Cast, SyntheticTask

NAME = "tasks"  # value of `data.tokens`
ENDLESS = 2**31  # texts of the training split
HELD_OUT = {  # combinations that do not occur in training; each pattern and each transformation does
    ("same-person", "country"),
    ("same-person", "next"),
    ("different-in-set", "capability"),
    ("different-in-set", "opposite"),
}
SHUNNED = "the-other-person"  # the opposite of same-person: early in training their gradients cancel
DRAWN_TASKS = tuple(task for task in TASKS if task.wording == 0 and task.pattern != SHUNNED)
TRAINED = tuple(task for task in DRAWN_TASKS if (task.pattern, task.transformation) not in HELD_OUT)
UNSEEN = tuple(task for task in DRAWN_TASKS if (task.pattern, task.transformation) in HELD_OUT)
CAST = Cast(words.NAMES[:8], 2)
EXAMPLES = 40  # examples per task, to collect the words of its sentences


@cache
def task_tokenizer() -> SubwordTokenizer:
    """Create a tokenizer in which every word of the suite, punctuation mark and line end is one token."""
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
    """Tokens of a text, and a mask of the answers."""

    ids: np.ndarray
    is_answer: np.ndarray


def encoded_text(task: SyntheticTask, random: Random, num_tokens: int) -> EncodedText:
    """Sample as many examples of a task as fit into a number of tokens, padded with end tokens.

    Every answer is one token and a target.
    """
    tokenizer = task_tokenizer()
    ids = np.full(num_tokens, tokenizer.eos_id, dtype=np.int64)
    is_answer = np.zeros(num_tokens, dtype=bool)
    at = 1  # a text starts with an end token
    while True:
        question, answer = task.example(random, CAST)
        (row,) = tokenizer.encode([f"{question} {answer}\n"])
        if at + len(row) > num_tokens:
            return EncodedText(ids, is_answer)
        ids[at : at + len(row)] = row
        at += len(row)
        is_answer[at - 2] = True  # before the end of the line


class TaskTexts(Dataset):
    """Texts of tasks: text i is a function of the split and i.

    Args:
        tasks: Tasks to sample from.
        split: Name of the split.
        context_length: Tokens T per text.

    Raises:
        UserError: If no example fits.
    """

    def __init__(self, tasks: tuple[SyntheticTask, ...], split: str, context_length: int) -> None:
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
    """Synthetic tasks with the interface of a corpus, for `TokenDataModule`."""

    folder = NAME

    @property
    def vocab_size(self) -> int:
        """Number of words, punctuation marks and the end token."""
        return task_tokenizer().vocab_size

    @cached_property
    def eos(self) -> str:
        """The end-of-text token."""
        return task_tokenizer().eos_token

    def tokenizer(self) -> SubwordTokenizer:
        """Return the tokenizer."""
        return task_tokenizer()

    def texts(self, split: str, context_length: int) -> TaskTexts:
        """Return the texts of a split: "train" and "val" have the trained combinations, "unseen" the others."""
        return TaskTexts(UNSEEN if split == "unseen" else TRAINED, split, context_length)
