"""Processes of a distributed evaluation, started by torchrun: each computes a part, and results are exchanged."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..errors import UserError, as_user_error

PATIENCE = timedelta(days=1)  # timeout of ranks that wait for others


class EvaluationRanks(NamedTuple):
    """Rank of this process."""

    rank: int
    size: int
    local_rank: int

    @property
    def is_first(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    def gather(self, value: object) -> list:
        """Return the values of all ranks in order, on every rank."""
        if self.size == 1:
            return [value]
        values: list = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def device(self, name: str) -> torch.device:
        """Return this process's device; "cuda" is one GPU per local rank.

        Raises:
            UserError: If the device is unknown.
        """
        with as_user_error(f"device={name!r} is unknown"):
            return torch.device("cuda", self.local_rank) if name == "cuda" else torch.device(name)


def _own_ranks() -> EvaluationRanks:
    """Read the environment variables set by torchrun.

    Raises:
        UserError: If they are inconsistent.
    """
    values = {name: os.environ.get(name, default) for name, default in ENVIRONMENT.items()}
    if not all(value.isdecimal() for value in values.values()) or int(values["RANK"]) >= int(values["WORLD_SIZE"]):
        raise UserError(f"{values}: expected numbers, with RANK below WORLD_SIZE, as torchrun sets them.")
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if int(values["WORLD_SIZE"]) > 1 and missing:
        raise UserError(f"WORLD_SIZE={values['WORLD_SIZE']} without {', '.join(missing)}: expected all, or none.")
    return EvaluationRanks(*map(int, values.values()))


@contextmanager
def init_ranks() -> Iterator[EvaluationRanks]:
    """Initialize the process group if there are several processes; destroy it at the end."""
    ranks = _own_ranks()
    if ranks.size == 1:
        yield ranks
        return
    dist.init_process_group("gloo", timeout=PATIENCE)
    try:
        yield ranks
    finally:
        dist.destroy_process_group()


ENVIRONMENT = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
