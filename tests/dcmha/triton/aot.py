"""Compiling the kernels for a GPU that need not be there: registers, spills and shared memory of each."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dcmha.impl.triton import kernels, launch

KERNELS = tuple(launch.TILES)
WORKSPACES = ("x", "da")
FLOATS = ("log_sum", "row_sum", "d_pre_q", "d_pre_k", "d_pre_base", "d_post_q", "d_post_k", "d_post_base")
FORMS = {"PRE_QR": 2, "PRE_QG": 1, "PRE_KR": 2, "PRE_KG": 1, "PRE_B": 0} | {
    "POST_QR": 2,
    "POST_QG": 1,
    "POST_KR": 2,
    "POST_KG": 1,
    "POST_B": 0,
}


class Resources(NamedTuple):
    """Of one kernel: registers of a thread, bytes it spills, bytes of shared memory of a block."""

    registers: int
    spills: int
    shared: int


def compile_kernel(name: str, capability: int, dtype: str = "bf16", slots_of_group: int = 16, **forms) -> Resources:
    """Compile a kernel as it is launched, for compute capability 80, 90, 100, ..."""
    kernel = getattr(kernels, name)
    query_tile, key_tile, num_warps = launch.tile_of(name, 4 if dtype == "fp32" else 2)
    dot = {"bf16": triton.language.bfloat16, "fp16": triton.language.float16, "fp32": triton.language.float32}[dtype]
    constants = FORMS | {"P": slots_of_group, "IS_CAUSAL": True, "HAS_MASK": False, "DOT": dot} | forms
    constants |= {"BQ": query_tile, "BK": key_tile}
    signature, attributes, constexprs = {}, {}, {}
    for index, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument], constexprs[(index,)] = "constexpr", constants[argument]
        elif argument in ("key_mask",):
            signature[argument] = "*u8"
        elif argument in FLOATS:
            signature[argument] = "*fp32"
        elif argument.startswith(("pre_", "post_", *WORKSPACES)):
            signature[argument] = f"*{dtype}"
        else:
            signature[argument] = "i32"
        if signature[argument].startswith("*") or argument in ("stride", "first_key"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    options = {
        "num_warps": num_warps,
        "num_stages": 1,
        "enable_fp_fusion": True,
    }
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return _resources(compiled.asm["cubin"], compiled.metadata.shared)


def _resources(cubin: bytes, shared: int) -> Resources:
    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([program, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    return Resources(int(re.search(r"REG:(\d+)", usage)[1]), int(re.search(r"STACK:(\d+)", usage)[1]), shared)


VARIANTS = {
    "16 heads": {},
    "groups of 8": {"slots_of_group": 8},
    "6 heads, bidirectional": {"slots_of_group": 8, "IS_CAUSAL": False},
    "static base": {"PRE_B": 1, "POST_B": 1},
    "query-wise": {"PRE_KR": 0, "PRE_KG": 0, "POST_KR": 0, "POST_KG": 0},
    "mask of keys": {"HAS_MASK": True},
    "one query": {"T": 1, "num_queries": 1, "num_groups": 1},  # sizes of 1 are constants of the launch
    "float16": {"dtype": "fp16"},
    "float32": {"dtype": "fp32"},
}


def main(capability: str, *variants: str) -> None:
    """Print, as JSON, the resources of every kernel in some variants."""
    rows = {}
    for variant in variants:
        for name in KERNELS:
            if variant != "query-wise" or name != "key_gradients":
                rows[f"{variant}: {name}"] = compile_kernel(name, int(capability), **VARIANTS[variant])._asdict()
    print(json.dumps(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
