"""Checkpoints that survive a kill at any moment, and finding the newest one of a run.

A checkpoint is a file, or, of a training that was sharded, a folder (`dctrain.checkpointing.sharded`); both are called
`NAME.ckpt`, and read alike.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from ..errors import UserError, as_user_error
from .content_checks import check_content, check_progress
from .sharded import is_sharded, read_meta, read_unsharded
from .sharded_index import INDEX, read_index
from .single_file import check_file, read_file
from .training_state import MODEL, OPTIMIZER, unflatten

RESUMED = {
    *("state_dict", "optimizer_states", "lr_schedulers", "loops", "global_step", "epoch", "callbacks"),
    "pytorch-lightning_version",
}


LATEST = "latest"  # what --resume takes for the newest of a name's runs
CHECKPOINTS = "checkpoints"  # the folder of a run's checkpoints
ACCEPTED = "a .ckpt file, or the folder of a run"


def find_checkpoint(path: str) -> Path:
    """Resolve what a user names: a checkpoint, or a run's folder, of which the newest checkpoint is taken.

    Raises:
        UserError: If there is none. A folder that only holds runs is none, as it does not say which.
    """
    if not path:
        raise UserError(f"'' names no checkpoint; expected {ACCEPTED}.")
    start = Path(path)
    if start.is_file() or is_sharded(start):
        return start
    if not start.is_dir():
        raise UserError(f"no checkpoint: {path} does not exist; expected {ACCEPTED}.")
    if start.suffix == ".ckpt":
        if (start / ".metadata").is_file():
            raise UserError(
                f"{path} is of an earlier version: its index can run code and is not read (see CHANGELOG.md)."
            )
        raise UserError(f"{path} is no whole checkpoint: it has no {INDEX}.")
    found = _newest([*start.glob("*.ckpt"), *start.glob(f"{CHECKPOINTS}/*.ckpt")])
    if found is None:
        newest = newest_checkpoint(start)
        run = None if newest is None else run_folder(newest)
        said = f"; below it is the run {run}, which can be named" if run is not None else ""
        raise UserError(f"no checkpoint: {path} is no folder of a run{said}; expected {ACCEPTED}.")
    return found


def newest_checkpoint(folder: Path) -> Path | None:
    """Find the newest checkpoint below a folder, that there need not be."""
    return _newest(folder.rglob("*.ckpt"))


def _newest(paths: Iterable[Path]) -> Path | None:
    return max(paths, key=lambda p: (p.stat().st_mtime_ns, _step(p)), default=None)


def _step(path: Path) -> int:
    """Read the training step from a file name such as `last-step=120.ckpt`."""
    match = re.search(r"step=(\d+)", path.name)
    return int(match[1]) if match else -1


def run_folder(checkpoint: Path) -> Path | None:
    """Return the folder of the run that wrote `RUN/checkpoints/NAME.ckpt`, or None if the file lies elsewhere."""
    return checkpoint.parent.parent if checkpoint.parent.name == CHECKPOINTS else None


def check_no_run(path: str) -> None:
    """Refuse to write a model into the folder of a run, whose newest checkpoint it would stand for ever after.

    Raises:
        UserError: If it is one.
    """
    if (Path(path) / CHECKPOINTS).is_dir():
        raise UserError(f"out={path} is the folder of a run; expected a folder of its own.")


def make_folder(path: str) -> Path:
    """Make a folder for results, unless it exists.

    Raises:
        UserError: If it cannot be made.
    """
    folder = Path(path)
    with as_user_error(f"the folder {path} cannot be made"):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def load_checkpoint(path: Path, *, with_optimizer: bool = False) -> dict:
    """Read a checkpoint safely (tensors and plain values only), its checksums compared.

    Args:
        path: A file, or the folder of a sharded one.
        with_optimizer: Read the optimiser's state of a folder, too.

    Raises:
        UserError: If it is not a whole checkpoint.
    """
    if is_sharded(path):
        return check_content(_load_sharded(path, with_optimizer), path)
    check_file(path)
    return check_content(read_file(path, mmap=False), path)


def _load_sharded(path: Path, with_optimizer: bool) -> dict:
    """Read what many ranks wrote, as if one process had."""
    meta, stored = read_meta(path), read_index(path).state_dict_metadata
    names = [name for name in stored if with_optimizer or name.startswith(MODEL)]
    optimizers = meta.pop("optimizer_states", [])
    whole = unflatten(read_unsharded(path, names), optimizers[0]["param_groups"] if optimizers else [])
    if not optimizers:  # a checkpoint of weights alone
        del whole["optimizer_states"]
    return meta | whole


def map_checkpoint(path: Path) -> dict:
    """Read a checkpoint but for its tensors: of a file they are mapped to memory, of a folder left out.

    Raises:
        UserError: If it is no checkpoint, or not all of its files are there.
    """
    if is_sharded(path):
        read_index(path)
        return check_content(read_meta(path), path)
    return check_content(read_file(path, mmap=True), path)


def check_weights(path: Path) -> None:
    """Check that a checkpoint holds weights, by what can be read without its tensors.

    Raises:
        UserError: If it is no checkpoint, or holds none.
    """
    if "state_dict" not in map_checkpoint(path) and not is_sharded(path):
        raise UserError(f"{path} is no checkpoint: it has no state_dict.")


def check_resumable(path: Path) -> int:
    """Check that a run can be taken up from a checkpoint, by what can be read without its tensors; return its step.

    Raises:
        UserError: If it is no checkpoint, or lacks the state of a run.
    """
    content = map_checkpoint(path)
    missing = sorted(RESUMED - content.keys())
    missing += [name for name in ("optimizer_states", "lr_schedulers", "loops") if not missing and not content[name]]
    if missing:
        raise UserError(f"{path} cannot be resumed from: it has no {', '.join(missing)}.")
    check_progress(content, path)
    skipped = content.get("skipped_steps", [0])[0]
    if content["global_step"] > skipped and not _has_scaler(content) and not _has_moments(path, content):
        raise UserError(f"{path} cannot be resumed from: it has no state of the optimiser.")
    return content["global_step"]


def _has_scaler(content: dict) -> bool:
    """Tell whether a gradient scaler took part, which skips steps by itself and does not count them."""
    return any(isinstance(state, dict) and "_growth_tracker" in state for state in content.values())


def _has_moments(path: Path, content: dict) -> bool:
    """Tell whether the optimiser's state is there, of any parameter."""
    if is_sharded(path):
        return any(name.startswith(OPTIMIZER) for name in read_index(path).state_dict_metadata)
    return bool(content["optimizer_states"][0].get("state"))
