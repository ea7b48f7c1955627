"""Time of each part of saving a checkpoint and resuming from it, by checkpoint size.

Decoders of several depths are saved in the format of one process (a file) and of several processes (a sharded folder),
and loaded in this process.

python benchmarks/resume.py --layers 2 4 8 --json benchmarks/results/resume_cpu.json
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measure import save

import dclm
from dctrain.checkpointing.async_save import ShardedCheckpointWriter
from dctrain.checkpointing.checkpoint import check_resumable, load_checkpoint
from dctrain.checkpointing.lightning_io import AtomicCheckpointIO
from dctrain.checkpointing.sharded import as_local_shard
from dctrain.checkpointing.training_state import flatten, named_groups
from dctrain.utils.environment import environment


def trained(num_layers: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Create a decoder and an optimizer with state, after one step with constant gradients."""
    config = dclm.decoder_config("dcformer_pp_405m", num_layers=num_layers, vocab_size=8192)
    module = torch.nn.ModuleDict({"model": dclm.Decoder(config)})
    optimizer = torch.optim.AdamW(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return module, optimizer


def seconds_of(function: Callable[[], object]) -> float:
    """Time a call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure_size(num_layers: int, folder: Path) -> dict:
    """Save a training state in both formats; time the save, the resume check ("look"), and the load."""
    module, optimizer = trained(num_layers)
    rest = dict.fromkeys(("lr_schedulers", "loops", "global_step", "epoch"), 0)
    content = rest | {"state_dict": module.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    groups = named_groups(module, optimizer)
    parts = {name: as_local_shard(x) for name, x in flatten(content, groups).items()}
    meta = rest | {"state_dict": {}, "optimizer_states": [{"param_groups": groups}]}

    def load(path: Path) -> None:
        loaded = load_checkpoint(path, with_optimizer=True)
        module.load_state_dict(loaded["state_dict"])
        optimizer.load_state_dict(loaded["optimizer_states"][0])

    saving = {
        "file": lambda path: AtomicCheckpointIO().save_checkpoint(content, path),
        "folder": lambda path: ShardedCheckpointWriter().save(path, parts, meta),
    }
    row = {"layers": num_layers, "bytes": sum(part.local.nbytes for part in parts.values())}
    for kind, write in saving.items():
        path = folder / f"{kind}.ckpt"
        row[kind] = {"save": seconds_of(lambda write=write, path=path: write(path))}
        row[kind]["look"] = seconds_of(lambda path=path: check_resumable(path))
        row[kind]["load"] = seconds_of(lambda path=path: load(path))
    return row


def main() -> None:
    """Run the benchmark and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--json", help="file for the raw results")
    options = parser.parse_args()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    rows = []
    for num_layers in options.layers:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row := measure_size(num_layers, Path(folder)))
        times = "   ".join(
            f"{kind}: " + ", ".join(f"{part} {1e3 * seconds:.0f} ms" for part, seconds in row[kind].items())
            for kind in ("file", "folder")
        )
        print(f"{row['bytes'] / 2**20:6.0f} MiB   {times}")
    torch.distributed.destroy_process_group()
    save(options.json, {"environment": environment(torch.device("cpu")), "options": vars(options), "rows": rows})


if __name__ == "__main__":
    main()
