"""Where the time of fused attention goes: each kernel and the products of matrices, in clocks an element.

python benchmarks/kernels.py --batch-size 8 --heads 16 --tokens 2048 --causal
python benchmarks/kernels.py --heads 6 --tokens 197 --batch-size 256 --tile composed_weights=8,16,4,2 --workspace-mib 64
An element is a query, a visible key and a head; a clock is one of a multiprocessor at 1.755 GHz.
"""

import argparse
from collections import Counter
from collections.abc import Callable

import torch
from attention import make_call, operator_parser, work
from measure import save
from torch.profiler import ProfilerActivity, profile

from dcmha.impl import chunks
from dcmha.impl.triton import launch
from dctrain.environment import environment

CLOCK = 1.755e9


def seconds_of_kernels(call: Callable[[], None], repeats: int) -> tuple[dict[str, float], dict[str, int]]:
    """Profile a call: seconds and launches of each kernel, of products of matrices, and of the rest."""
    call()
    call()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    seconds, launches = Counter(), Counter()
    for event in profiler.key_averages():
        name = kind_of(event.key)
        seconds[name] += event.self_device_time_total / 1e6 / repeats
        launches[name] += event.count // repeats
    return seconds, launches


def kind_of(name: str) -> str:
    """Tell what a GPU's kernel belongs to."""
    ours = [kernel for kernel in launch.TILES if kernel in name]
    if ours:
        return ours[0]
    is_product = any(part in name.lower() for part in ("gemm", "cutlass", "nvjet", "xmma"))
    return "products" if is_product else "the rest"


def apply(options: argparse.Namespace) -> None:
    """Use the tiles and the workspace that the command line asks for."""
    for tile in options.tile:
        name, _, numbers = tile.partition("=")
        values = tuple(map(int, numbers.split(",")))
        if name not in launch.TILES or len(values) not in (4, 5):
            names = ", ".join(launch.TILES)
            raise SystemExit(f"--tile={tile}; accepted: NAME=queries,keys,warps,stages[,registers] of {names}.")
        for table in (launch.TILES, launch.MASKED_TILES, launch.TWO_BLOCK_TILES, launch.WIDE_TILES):
            table[name] = launch.Tile(*values)
    if options.workspace_mib:
        chunks.WORKSPACE_MIB = options.workspace_mib


def main() -> None:
    """Measure and print."""
    parser = operator_parser(__doc__)
    parser.add_argument("--tile", nargs="*", default=[], help="NAME=queries,keys,warps,stages[,registers]")
    parser.add_argument("--workspace-mib", type=int)
    parser.set_defaults(device="cuda", dtype="bfloat16", tokens=[2048])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device.")
    apply(options)
    device, results = torch.device("cuda"), []
    per_second = torch.cuda.get_device_properties(device).multi_processor_count * CLOCK
    for tokens in options.tokens:
        elements = work(options, tokens, True)["elements"]
        seconds, launches = seconds_of_kernels(make_call("triton", True, tokens, options), options.repeats)
        for name, value in [*seconds.items(), ("all", sum(seconds.values()))]:
            clocks = value * per_second / elements
            count = launches.get(name, "")
            print(f"{tokens:6} {name:18} {1e3 * value:9.3f} ms {clocks:6.3f} clocks {count:5} launches")
            results.append({"tokens": tokens, "name": name, "seconds": value, "clocks": clocks})
    save(options.json, {"environment": environment(device), "options": vars(options), "results": results})


if __name__ == "__main__":
    main()
