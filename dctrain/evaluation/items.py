"""What an evaluation found of each of its items (images, sequences), for comparisons that are paired by item.

A run writes those of its last validation to `items-rankN.npz` in its folder.
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
    """A metric of each item.

    Attributes:
        values: By the item's name.
        weights: What each counts in the metric's mean (tokens of a sequence, 1 for an image).
    """

    values: dict[str, float]
    weights: dict[str, float]


class ItemRecorder:
    """Collects a metric's values of the items of one evaluation; they stay on their device until they are written."""

    def __init__(self) -> None:
        self._batches: dict[str, list[tuple[list[str], Tensor, Tensor]]] = {}

    def clear(self) -> None:
        """Forget the evaluation before."""
        self._batches.clear()

    def add(self, metric: str, names: Sequence[object], values: Tensor, weights: Tensor | None = None) -> None:
        """Add a batch.

        Args:
            metric: Its name, as it is logged.
            names: N names of the items, each unique in the evaluation; without names nothing is kept.
            values: [N].
            weights: [N]; 1 if left out.
        """
        if any(name != "" for name in names):
            values = values.detach().float()
            weights = torch.ones_like(values) if weights is None else weights.detach().float()
            self._batches.setdefault(metric, []).append((list(map(str, names)), values, weights))

    def write(self, folder: Path, rank: int, world_size: int) -> None:
        """Write what this rank has collected, unless that is nothing; rank 0 removes files of former ranks."""
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
    """Read what all ranks of a run have written, by metric.

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
    """Write items as one rank would."""
    recorder = ItemRecorder()
    for metric, (values, weights) in items.items():
        recorder.add(metric, list(values), torch.tensor([*values.values()]), torch.tensor([*weights.values()]))
    folder.mkdir(parents=True, exist_ok=True)
    recorder.write(folder, 0, 1)
