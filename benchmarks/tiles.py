"""Which tiles of the fused kernels are fastest: each kernel by itself, on the largest chunk of a call, with many.

python benchmarks/tiles.py --batch-size 8 --heads 16 --tokens 2048 --causal --json tiles.json
A tile is the five numbers of `launch.Tile`: queries, keys, warps, stages, registers. Compiling takes minutes; what is
compiled stays in Triton's cache. A tile that wins is a line of `launch.py`, once `pytest -m gpu` has passed with it.
"""

import argparse
import itertools
import multiprocessing
import os
import statistics
from typing import NamedTuple

import torch
import triton
from attention import make_call, operator_parser
from kernels import CLOCK
from measure import save

from dcmha import visible_pairs
from dcmha.impl.chunks import Chunk
from dcmha.impl.triton import launch
from dctrain.environment import environment

OWN, OTHER = (2, 4, 8, 16), (16, 32)  # tokens of the side whose matrices a program keeps, and of the other
ELEMENTS = (8, 16, 32)  # of a thread
STAGES, REGISTERS = (1, 2), (None, 128, 168)


class Launch(NamedTuple):
    """A launch of one kernel, to be repeated with other tiles."""

    mixer: launch.Mixer
    name: str
    chunk: Chunk
    tensors: list[torch.Tensor | None]
    num_splits: int

    def seconds(self, tile: launch.Tile, repeats: int) -> list[float]:
        """Time a tile; [] if it does not compile, or takes more of a multiprocessor than there is."""
        times, launch.tile_of = [], lambda *_: tile
        for number in range(1 + repeats):
            for tensor in self.tensors:
                if tensor is not None and tensor.shape == self.tensors[0].shape:
                    tensor.normal_()  # a workspace, in which some kernels leave results
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            try:
                self.mixer.run(*self[1:])
            except (triton.TritonError, RuntimeError):
                return []
            stop.record()
            torch.cuda.synchronize()
            times += [start.elapsed_time(stop) / 1e3] if number else []
        return times


def largest_launches(options: argparse.Namespace) -> list[Launch]:
    """Run a call, forward and backward, and keep the launch of each kernel on the largest chunk."""
    launches, run = {}, launch.Mixer.run

    def keep(mixer: launch.Mixer, name: str, chunk: Chunk, tensors: list, num_splits: int = 1) -> None:
        if name not in launches or chunk.workspace_size(1) >= launches[name].chunk.workspace_size(1):
            launches[name] = Launch(mixer, name, chunk, tensors, num_splits)
        run(mixer, name, chunk, tensors, num_splits)

    launch.Mixer.run = keep
    make_call("triton", True, options.tokens[0], options)()
    launch.Mixer.run = run
    return list(launches.values())


def candidates(launches: list[Launch]) -> list[tuple[Launch, launch.Tile]]:
    """List all that is to be timed."""
    found = []
    for of, own, other, count in itertools.product(launches, OWN, OTHER, ELEMENTS):
        warps, rest = divmod(own * other * 16 * of.mixer.kind.BLOCKS, 32 * count)
        if not rest and warps in (1, 2, 4, 8):
            sizes = (other, own) if of.name == "key_gradients" else (own, other)
            found += [(of, launch.Tile(*sizes, warps, *more)) for more in itertools.product(STAGES, REGISTERS)]
    return found


def compile_some(options: argparse.Namespace, first: int) -> None:
    """Compile every n-th candidate, from one on, for one row of the batch; n processes do."""
    launches = largest_launches(argparse.Namespace(**vars(options) | {"batch_size": 1}))
    for of, tile in candidates(launches)[first :: options.jobs]:
        of.seconds(tile, 0)


def main() -> None:
    """Measure, and print the best."""
    parser = operator_parser(__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compile")
    parser.set_defaults(device="cuda", dtype="bfloat16", tokens=[2048], repeats=5)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device.")
    launches, rows = largest_launches(options), []
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        pool.starmap(compile_some, [(options, number) for number in range(options.jobs)])
    per_second = torch.cuda.get_device_properties(0).multi_processor_count * CLOCK
    for of, tile in candidates(launches):
        if times := of.seconds(tile, options.repeats):
            last = of.chunk.queries.stop if options.causal else options.tokens[0]
            pairs = visible_pairs(of.chunk.num_queries, last, is_causal=options.causal, window=options.window)
            clocks = statistics.median(times) * per_second / (of.chunk.num_rows * options.heads * pairs)
            rows.append({"kernel": of.name, "tile": tile, "seconds": times, "clocks": clocks})
    for of in launches:
        for row in sorted((row for row in rows if row["kernel"] == of.name), key=lambda row: row["clocks"])[:5]:
            print(f"{of.name:18} {row['clocks']:6.3f} clocks  {tuple(row['tile'])}")
    save(options.json, {"environment": environment(torch.device("cuda")), "options": vars(options), "results": rows})


if __name__ == "__main__":
    main()
