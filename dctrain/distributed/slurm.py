"""SLURM: Lightning's cluster environment without its automatic requeueing."""

from pathlib import Path

from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment

from ..errors import UserError


def cluster_plugins(chosen: list, root: Path, is_resumed: bool) -> list[ClusterEnvironment]:
    """Create the plugin for a SLURM job; none outside of SLURM or if the user selected one.

    On SIGUSR1 Lightning would save `hpc_ckpt_N.ckpt` in the root folder, and silently load it in any later run. Here
    the signal stops the run like others, and `--resume latest` continues it.

    Args:
        chosen: The user's plugins.
        root: Folder of all experiments.
        is_resumed: Whether a checkpoint is given.

    Raises:
        UserError: If such a file exists and Lightning would load it.
    """
    if not SLURMEnvironment.detect() or any(isinstance(plugin, ClusterEnvironment) for plugin in chosen):
        return []
    left = sorted(root.glob("hpc_ckpt_*.ckpt"))
    if left and not is_resumed:
        raise UserError(
            f"{left[-1]} would be loaded by Lightning; continue from it with --resume={left[-1]}, or move it."
        )
    return [SLURMEnvironment(auto_requeue=False)]
