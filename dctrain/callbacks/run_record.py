"""Record of a run's configuration and environment in its folder."""

from pathlib import Path

import lightning as L
from jsonargparse import Namespace
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser

from ..loggers import record_ids
from ..run_dir import CONFIG, ENVIRONMENT, RESUMED_CONFIG
from ..utils.environment import add_environment, environment
from ..utils.files import atomic_write


class RunRecord(Callback):
    """Writes the record of a run into its folder.

    - `config.yaml`, the configuration, accepted by every subcommand;
    - `environment.json`, a list of environments, because a resumed run may continue on another machine;
    - `loggers.json`, the ids that loggers assigned to the run;
    - at the end `items-rankN.npz`, results of the last validation per item, for comparisons of models.

    Args:
        parser: Parser of the configuration.
        config: The given configuration; `resume` is not recorded.
        is_resumed: Whether the run already has a configuration, which is kept.
    """

    def __init__(self, parser: LightningArgumentParser, config: Namespace, is_resumed: bool) -> None:
        config = config.clone()
        config.pop("resume", None)
        self.name = RESUMED_CONFIG if is_resumed else CONFIG
        self.content = parser.dump(config, skip_none=False)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Write the configuration and the environment."""
        folder = Path(trainer.log_dir)  # a broadcast: all ranks ask
        if not trainer.is_global_zero:
            return
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder / self.name) as file:
            file.write(self.content.encode())
        place = environment(trainer.strategy.root_device) | {"devices": trainer.world_size}
        add_environment(folder / ENVIRONMENT, place)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the loggers' ids."""
        record_ids(trainer.loggers, Path(trainer.log_dir))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the items of the last validation, on every rank."""
        pl_module.items.write(Path(trainer.log_dir), trainer.global_rank, trainer.world_size)
