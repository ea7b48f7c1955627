"""Evaluation of language models: perplexity of texts and target spans, synthetic tasks, lm-evaluation-harness."""

from .command import evaluate

__all__ = ["evaluate"]
