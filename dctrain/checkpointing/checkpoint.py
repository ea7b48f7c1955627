"""Finding, loading and checking checkpoints.

A checkpoint is a file, or a folder if training was sharded (`dctrain.checkpointing.sharded`). Both are named
`NAME.ckpt` and are read by the same functions.
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


LATEST = "latest"  # value of --resume for the newest run of a name
CHECKPOINTS = "checkpoints"  # folder of a run's checkpoints
ACCEPTED = "a .ckpt file, or the folder of a run"


def find_checkpoint(path: str) -> Path:
    """Resolve a path: a checkpoint, or a run's folder, whose newest checkpoint is returned.

    Raises:
        UserError: If there is no checkpoint. A folder of several runs is not accepted, because it is ambiguous.
    """
    if not path:
        raise UserError(f"checkpoint='': expected {ACCEPTED}.")
    start = Path(path)
    if start.is_file() or is_sharded(start):
        return start
    if not start.is_dir():
        raise UserError(f"no checkpoint: {path} does not exist; expected {ACCEPTED}.")
    if start.suffix == ".ckpt":
        if (start / ".metadata").is_file():
            raise UserError(f"{path} was written by an earlier version, whose index can run code (see CHANGELOG.md).")
        raise UserError(f"{path} is not a complete checkpoint: it has no {INDEX}.")
    found = _newest([*start.glob("*.ckpt"), *start.glob(f"{CHECKPOINTS}/*.ckpt")])
    if found is None:
        newest = newest_checkpoint(start)
        run = None if newest is None else run_folder(newest)
        message = f"; it contains the run {run}" if run is not None else ""
        raise UserError(f"no checkpoint: {path} is not the folder of a run{message}; expected {ACCEPTED}.")
    return found


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint below a folder, which need not exist; None if there is none."""
    return _newest(folder.rglob("*.ckpt"))


def _newest(paths: Iterable[Path]) -> Path | None:
    return max(paths, key=lambda p: (p.stat().st_mtime_ns, _step(p)), default=None)


def _step(path: Path) -> int:
    """Parse the training step of a file name such as `last-step=120.ckpt`."""
    match = re.search(r"step=(\d+)", path.name)
    return int(match[1]) if match else -1


def run_folder(checkpoint: Path) -> Path | None:
    """Return the folder of the run that wrote `RUN/checkpoints/NAME.ckpt`, or None for other paths."""
    return checkpoint.parent.parent if checkpoint.parent.name == CHECKPOINTS else None


def check_no_run(path: str) -> None:
    """Check that an output folder is not a run, because a model in it could be mistaken for its newest checkpoint.

    Raises:
        UserError: If it is a run.
    """
    if (Path(path) / CHECKPOINTS).is_dir():
        raise UserError(f"out={path} is the folder of a run; expected a separate folder.")


def make_folder(path: str) -> Path:
    """Create a folder for results, unless it exists.

    Raises:
        UserError: If it cannot be created.
    """
    folder = Path(path)
    with as_user_error(f"cannot create the folder {path}"):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def load_checkpoint(path: Path, *, with_optimizer: bool = False) -> dict:
    """Load a checkpoint safely (tensors and plain values only), and verify its checksums.

    Args:
        path: A file, or the folder of a sharded checkpoint.
        with_optimizer: Also load the optimizer's state of a sharded checkpoint.

    Raises:
        UserError: If it is incomplete or damaged.
    """
    if is_sharded(path):
        return check_content(_load_sharded(path, with_optimizer), path)
    check_file(path)
    return check_content(read_file(path, mmap=False), path)


def _load_sharded(path: Path, with_optimizer: bool) -> dict:
    """Load a sharded checkpoint in the form of a single-process one."""
    meta, stored = read_meta(path), read_index(path).state_dict_metadata
    names = [name for name in stored if with_optimizer or name.startswith(MODEL)]
    optimizers = meta.pop("optimizer_states", [])
    whole = unflatten(read_unsharded(path, names), optimizers[0]["param_groups"] if optimizers else [])
    if not optimizers:  # weights only
        del whole["optimizer_states"]
    return meta | whole


def map_checkpoint(path: Path) -> dict:
    """Read a checkpoint without loading its tensors: those of a file are memory-mapped, those of a folder omitted.

    Raises:
        UserError: If it is not a checkpoint, or files are missing.
    """
    if is_sharded(path):
        read_index(path)
        return check_content(read_meta(path), path)
    return check_content(read_file(path, mmap=True), path)


def check_weights(path: Path) -> None:
    """Check that a checkpoint has weights, without loading its tensors.

    Raises:
        UserError: If it is not a checkpoint, or has no weights.
    """
    if "state_dict" not in map_checkpoint(path) and not is_sharded(path):
        raise UserError(f"{path} is not a checkpoint: it has no state_dict.")


def check_resumable(path: Path) -> int:
    """Check that a run can be resumed from a checkpoint, without loading its tensors; return its step.

    Raises:
        UserError: If it is not a checkpoint, or lacks the state of a run.
    """
    content = map_checkpoint(path)
    missing = sorted(RESUMED - content.keys())
    missing += [name for name in ("optimizer_states", "lr_schedulers", "loops") if not missing and not content[name]]
    if missing:
        raise UserError(f"{path} cannot be resumed: it has no {', '.join(missing)}.")
    check_progress(content, path)
    skipped = content.get("skipped_steps", [0])[0]
    if content["global_step"] > skipped and not _has_scaler(content) and not _has_moments(path, content):
        raise UserError(f"{path} cannot be resumed: it has no optimizer state.")
    return content["global_step"]


def _has_scaler(content: dict) -> bool:
    """Whether the run used a gradient scaler, which skips steps without counting them."""
    return any(isinstance(state, dict) and "_growth_tracker" in state for state in content.values())


def _has_moments(path: Path, content: dict) -> bool:
    """Whether there is an optimizer state of any parameter."""
    if is_sharded(path):
        return any(name.startswith(OPTIMIZER) for name in read_index(path).state_dict_metadata)
    return bool(content["optimizer_states"][0].get("state"))
