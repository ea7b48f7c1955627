"""Record of a model's parameters and FLOPs."""

from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import Callback

from ..data.datamodule import ResumableDataModule
from ..distributed.strategy import data_rank
from ..utils.files import write_json

COSTS = "costs.json"


class CostRecord(Callback):
    """Writes the number of parameters, the forward FLOPs per unit (image, token), and the units per optimizer step to
    the run's `costs.json`, and prints the first two.
    """

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the record, if the run has a folder and a `ResumableDataModule`."""
        folder = trainer.log_dir  # a collective operation: called on all ranks
        if folder is None or not isinstance(trainer.datamodule, ResumableDataModule) or not trainer.is_global_zero:
            return
        samples = trainer.datamodule.batch_size * data_rank(trainer).ranks * trainer.accumulate_grad_batches
        costs = {
            "parameters": sum(p.numel() for p in pl_module.model.parameters()),
            "forward_flops": pl_module.forward_flops,
            "unit": pl_module.speed_unit,
            "units_per_step": samples * pl_module.example(1).units,
        }
        write_json(Path(folder) / COSTS, costs)
        name, unit = pl_module.hparams.get("model", type(pl_module.model).__name__), costs["unit"].removesuffix("s")
        size = f"{costs['parameters']:,} parameters"
        print(f"model {name}: {size}, {costs['forward_flops']:,} FLOPs in the forward pass of one {unit}", flush=True)
