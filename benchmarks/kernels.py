"""Time of each fused attention kernel and of the matrix products, in clocks per element.

python benchmarks/kernels.py --batch-size 8 --heads 16 --tokens 2048 --causal
python benchmarks/kernels.py --heads 6 --tokens 197 --batch-size 256 --impl older
An element is a query, a visible key and a head; a clock is one cycle of a multiprocessor at 1.755 GHz. "older" selects
the Triton kernels, which the Gluon kernels replace for 16-bit dtypes.
"""

from collections import Counter
from collections.abc import Callable

import torch
from attention import make_call, operator_parser, work
from measure import save
from torch.profiler import ProfilerActivity, profile

from dcmha.impl import chunks
from dctrain.utils.environment import environment

CLOCK = 1.755e9
KERNELS = (
    "pack_weights",
    "row_statistics",
    "composed_weights",
    "short_weights",
    "post_gradients",
    "pre_gradients",
    "short_gradients",
    "wide_key_gradients",
    "key_gradients",
)


def seconds_of_kernels(call: Callable[[], None], repeats: int) -> tuple[dict[str, float], dict[str, int]]:
    """Profile a call; return seconds and launches of each kernel, of the matrix products, and of all other kernels."""
    call()
    call()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    seconds, launches = Counter(), Counter()
    for event in profiler.key_averages():
        name = kernel_config(event.key)
        seconds[name] += event.self_device_time_total / 1e6 / repeats
        launches[name] += event.count // repeats
    return seconds, launches


def kernel_config(name: str) -> str:
    """Return the category of a GPU kernel, given its name."""
    for kernel in KERNELS:
        if kernel in name:
            return kernel
    is_product = any(part in name.lower() for part in ("gemm", "cutlass", "nvjet", "xmma"))
    return "products" if is_product else "the rest"


def clocks_per_second() -> float:
    """Return the clocks per second, summed over all multiprocessors."""
    return torch.cuda.get_device_properties(0).multi_processor_count * CLOCK


def main() -> None:
    """Run the benchmark and print the results."""
    parser = operator_parser(__doc__)
    parser.add_argument("--impl", default="triton", choices=("triton", "older"))
    parser.add_argument("--workspace-mib", type=int, help="workspace of the older kernels in MiB")
    parser.set_defaults(device="cuda", dtype="bfloat16", tokens=[2048])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device.")
    if options.workspace_mib:
        chunks.WORKSPACE_MIB = options.workspace_mib
    results = []
    for tokens in options.tokens:
        elements = work(options, tokens, True)["elements"]
        seconds, launches = seconds_of_kernels(make_call(options.impl, True, tokens, options), options.repeats)
        for name, value in [*seconds.items(), ("all", sum(seconds.values()))]:
            clocks = value * clocks_per_second() / elements
            count = launches.get(name, "")
            print(f"{tokens:6} {name:18} {1e3 * value:9.3f} ms {clocks:6.3f} clocks {count:5} launches")
            results.append({"tokens": tokens, "name": name, "seconds": value, "clocks": clocks})
    save(options.json, {"environment": environment(torch.device("cuda")), "options": vars(options), "results": results})


if __name__ == "__main__":
    main()
