"""The synthetic suite of section 4.3: tasks that take the right attention and the right transformation at once."""

from .tasks import TASKS, Task
from .texts import TaskText, make_suite, make_text, read_texts, write_texts

__all__ = ["TASKS", "Task", "TaskText", "make_suite", "make_text", "read_texts", "write_texts"]
