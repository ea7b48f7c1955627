"""Yardsticks: perplexity of texts and of target spans, and tasks of the lm-evaluation-harness, for any model."""

from .command import evaluate

__all__ = ["evaluate"]
