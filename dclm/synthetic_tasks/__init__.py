"""Synthetic tasks of section 4.3, each of which needs an attention pattern and a transformation."""

from .tasks import TASKS, SyntheticTask
from .texts import TaskText, make_suite, make_text, read_texts, write_texts

__all__ = ["TASKS", "SyntheticTask", "TaskText", "make_suite", "make_text", "read_texts", "write_texts"]
