"""Common parts of evaluations: resumable results, distributed ranks, tables."""
