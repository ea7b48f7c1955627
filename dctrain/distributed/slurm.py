"""SLURM: Lightning's environment of a job, without its own way to requeue it."""

from pathlib import Path

from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment

from ..errors import UserError


def cluster_plugins(chosen: list, root: Path, is_resumed: bool) -> list[ClusterEnvironment]:
    """Make the plugin that a job of SLURM needs; none elsewhere, or where the user chose one.

    Lightning would save `hpc_ckpt_N.ckpt` beside all runs on SIGUSR1, and load it silently in any later run. Here that
    signal stops a run as others do, and `--resume latest` goes on.

    Args:
        chosen: The user's plugins.
        root: Folder of all experiments.
        is_resumed: Whether a checkpoint is named.

    Raises:
        UserError: If such a file lies there, and Lightning would load it.
    """
    if not SLURMEnvironment.detect() or any(isinstance(plugin, ClusterEnvironment) for plugin in chosen):
        return []
    left = sorted(root.glob("hpc_ckpt_*.ckpt"))
    if left and not is_resumed:
        raise UserError(f"{left[-1]} would be loaded; go on from it with --resume={left[-1]}, or move it away.")
    return [SLURMEnvironment(auto_requeue=False)]
