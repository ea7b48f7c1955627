"""Evaluation of classifiers: accuracy on image sets, with ImageNet's original and ReaL labels, and throughput."""

from .command import evaluate

__all__ = ["evaluate"]
