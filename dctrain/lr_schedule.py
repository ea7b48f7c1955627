"""The learning-rate schedule of all trainers."""

import math


def warmup_cosine(step: int, warmup_steps: int, total_steps: int, final_fraction: float) -> float:
    """Return the learning rate's factor: linear from 0 over the warm-up, then a cosine to `final_fraction`."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return final_fraction + (1 - final_fraction) * 0.5 * (1 + math.cos(math.pi * progress))
