"""Yardsticks for classifiers: accuracy on any images, with ImageNet's own and reassessed labels, and throughput."""

from .command import evaluate

__all__ = ["evaluate"]
