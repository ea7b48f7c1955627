"""Search for the fastest register limits and chunk sizes of the Gluon kernels; print them as source code.

python benchmarks/tiles.py --batch-size 8 --heads 16 --tokens 2048 --causal --json tiles.json
Each setting applies to all kernels of a call, forward and backward; each kernel is timed separately. Copy the fastest
settings to `REGISTERS` in `dcmha/impl/gluon/launch.py` and to the constants in `call.py` if `pytest -m gpu` passes.
"""

import argparse

import torch
from attention import make_call, operator_parser, work
from kernels import KERNELS, clocks_per_second, seconds_of_kernels
from measure import save

from dcmha.impl.gluon import call, launch
from dctrain.utils.environment import environment

REGISTERS = (None, 80, 96, 128, 168, 200)  # maximum per thread
PROGRAMS = (1024, 2048, 4096, 8192, 16384)
KEY_PROGRAMS = (1, 1056, 2112, 4224)


def clocks(options: argparse.Namespace) -> dict[str, float]:
    """Time a call; return the clocks per element of each kernel."""
    tokens = options.tokens[0]
    seconds, _ = seconds_of_kernels(make_call("triton", True, tokens, options), options.repeats)
    elements = work(options, tokens, True)["elements"]
    return {name: value * clocks_per_second() / elements for name, value in seconds.items()}


def sweep_registers(options: argparse.Namespace) -> list[dict]:
    """Time all register limits; print the fastest limit for each kernel."""
    rows = []
    for limit in REGISTERS:
        launch.REGISTERS = {} if limit is None else dict.fromkeys(KERNELS, limit)
        launch._compiled.clear()
        rows.append({"registers": limit, "clocks": clocks(options)})
    print("REGISTERS = {  # most of a thread")
    for kernel in rows[0]["clocks"].keys() & set(KERNELS):
        best = min(rows, key=lambda row: row["clocks"][kernel])
        tried = ", ".join(f"{row['registers']}: {row['clocks'][kernel]:.3f}" for row in rows)
        print(f'    "{kernel}": {best["registers"]},  # clocks of {tried}')
    print("}")
    return rows


def sweep_constant(options: argparse.Namespace, name: str, values: tuple[int, ...]) -> list[dict]:
    """Time values of a constant in `call.py`; print the total clocks of a call for each value."""
    rows, usual = [], getattr(call, name)
    for value in values:
        setattr(call, name, value)
        rows.append({name: value, "clocks": clocks(options)})
        print(f"{name} = {value}  # {sum(rows[-1]['clocks'].values()):.3f} clocks")
    setattr(call, name, usual)
    return rows


def main() -> None:
    """Run the benchmark and print the fastest settings."""
    parser = operator_parser(__doc__)
    parser.set_defaults(device="cuda", dtype="bfloat16", tokens=[2048], repeats=5)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device.")
    usual = launch.REGISTERS
    rows = sweep_registers(options)
    launch.REGISTERS = usual
    launch._compiled.clear()
    rows += sweep_constant(options, "PROGRAMS", PROGRAMS)
    rows += sweep_constant(options, "KEY_PROGRAMS", KEY_PROGRAMS)
    save(options.json, {"environment": environment(torch.device("cuda")), "options": vars(options), "results": rows})


if __name__ == "__main__":
    main()
