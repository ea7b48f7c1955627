"""Per-item results of an evaluation (images, sequences), for paired comparisons.

A run writes the items of its last validation to `items-rankN.npz` in its folder.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import as_user_error
from ..utils.files import atomic_write

NAME = "items-rank{}.npz"


class Items(NamedTuple):
    """A metric per item.

    Attributes:
        values: Value by the item's name.
        weights: Weight of each item in the metric's mean (tokens of a sequence, 1 for an image).
    """

    values: dict[str, float]
    weights: dict[str, float]


class ItemRecorder:
    """Collects per-item metrics of one evaluation; they stay on their device until they are written."""

    def __init__(self) -> None:
        self._batches: dict[str, list[tuple[list[str], Tensor, Tensor]]] = {}

    def clear(self) -> None:
        """Discard the previous evaluation."""
        self._batches.clear()

    def add(self, metric: str, names: Sequence[object], values: Tensor, weights: Tensor | None = None) -> None:
        """Add a batch.

        Args:
            metric: Logged name of the metric.
            names: Names of N items, unique within the evaluation; without names nothing is recorded.
            values: Values [N].
            weights: Weights [N]; 1 by default.
        """
        if any(name != "" for name in names):
            values = values.detach().float()
            weights = torch.ones_like(values) if weights is None else weights.detach().float()
            self._batches.setdefault(metric, []).append((list(map(str, names)), values, weights))

    def write(self, folder: Path, rank: int, world_size: int) -> None:
        """Write the items of this rank, if there are any; rank 0 removes files of earlier ranks."""
        arrays = {}
        for metric, batches in self._batches.items():
            names, values, weights = zip(*batches, strict=True)
            arrays[f"{metric}:names"] = np.array([name for batch in names for name in batch])
            arrays[f"{metric}:values"] = torch.cat(values).cpu().numpy()
            arrays[f"{metric}:weights"] = torch.cat(weights).cpu().numpy()
        if not arrays:
            return
        if rank == 0:
            current = {NAME.format(number) for number in range(world_size)}
            for path in folder.glob(NAME.format("*")):
                if path.name not in current:
                    path.unlink()
        with atomic_write(folder / NAME.format(rank)) as file:
            np.savez_compressed(file, **arrays)


def read_items(folder: Path) -> dict[str, Items]:
    """Read the items of all ranks of a run, by metric.

    Raises:
        UserError: If a file cannot be read.
    """
    found: dict[str, Items] = {}
    for path in sorted(folder.glob(NAME.format("*"))):
        with as_user_error(f"{path} cannot be read"), np.load(path, allow_pickle=False) as arrays:
            for metric in dict.fromkeys(key.rpartition(":")[0] for key in arrays.files):
                items = found.setdefault(metric, Items({}, {}))
                names = arrays[f"{metric}:names"].tolist()
                items.values.update(zip(names, arrays[f"{metric}:values"].tolist(), strict=True))
                items.weights.update(zip(names, arrays[f"{metric}:weights"].tolist(), strict=True))
    return found


def write_items(folder: Path, items: Mapping[str, Items]) -> None:
    """Write items as a single rank."""
    recorder = ItemRecorder()
    for metric, (values, weights) in items.items():
        recorder.add(metric, list(values), torch.tensor([*values.values()]), torch.tensor([*weights.values()]))
    folder.mkdir(parents=True, exist_ok=True)
    recorder.write(folder, 0, 1)
