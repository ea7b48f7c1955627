"""Compiling the kernels for a GPU that need not be there: registers, spills, shared memory and instructions of each."""

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
FLOATS = ("log_sum", "log_sums", "row_sum", "row_sums")
ALIGNED = ("num_keys",)  # sizes that are multiples of 16; the others are not specialised
KIND = kernels.Kind(GROUP_SLOTS=16, HEADS=16, IS_CAUSAL=True, HAS_WINDOW=False, HAS_MASK=False, DOT=None)
FORM = kernels.Form(QUERY_RANK=2, QUERY_GATE=1, KEY_RANK=2, KEY_GATE=1, BASE=0)
DOTS = {"bf16": triton.language.bfloat16, "fp16": triton.language.float16, "fp32": triton.language.float32}


class Resources(NamedTuple):
    """Of one kernel.

    Attributes:
        registers: Of a thread.
        spills: Bytes of a thread.
        shared: Bytes of shared memory of a block.
        instructions: Of the main loop, for 32 elements (one query, key and head each): issue slots of a warp per 32.
    """

    registers: int
    spills: int
    shared: int
    instructions: float


def compile_kernel(
    name: str,
    capability: int,
    dtype: str = "bf16",
    tile: tuple[int, int, int, int] | None = None,
    form: dict[str, int] | None = None,
    **kind,
) -> Resources:
    """Compile a kernel as it is launched, for compute capability 80, 90, 100, ..., with its shipped tile or another.

    Both compositions are of `FORM`, the call of `KIND`, with other fields as given.
    """
    kernel = getattr(kernels, name)
    kind = KIND._replace(DOT=DOTS[dtype], **kind)
    shipped = launch.tile_of(name, 4 if dtype == "fp32" else 2, kind.HAS_MASK)
    query_tile, key_tile, num_warps, num_stages = tile or shipped
    form = FORM._replace(**form or {})
    constants = {"KIND": kind, "PRE": form, "POST": form, "BQ": query_tile, "BK": key_tile}
    signature, attributes, constexprs = {}, {}, {}
    for index, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument], constexprs[(index,)] = "constexpr", constants[argument]
        elif argument == "key_mask":
            signature[argument] = "*u8"
        elif argument in FLOATS or argument.startswith("d_"):
            signature[argument] = "*fp32"
        elif argument in ("x", "da") or argument.startswith(("pre_", "post_")):
            signature[argument] = f"*{dtype}"
        else:
            signature[argument] = "i32"
        if signature[argument].startswith("*") or argument in ALIGNED:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    usage, code = (_dump(compiled.asm["cubin"], what) for what in ("--dump-resource-usage", "--dump-sass"))
    elements = query_tile * key_tile * 16 / (32 * num_warps)  # of a thread
    return Resources(
        int(re.search(r"REG:(\d+)", usage)[1]),
        int(re.search(r"STACK:(\d+)", usage)[1]),
        compiled.metadata.shared,
        round(_main_loop(code) / elements, 1),
    )


def _dump(cubin: bytes, what: str) -> str:
    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([program, what, file.name], capture_output=True, text=True).stdout


def _main_loop(code: str) -> int:
    """Count the instructions of the shortest loop among those with most products of matrices."""
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", code)
    instructions = [(int(address, 16), text) for address, text in found]
    loops = []
    for address, text in instructions:
        target = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
        if target and int(target[1], 16) < address:
            loops.append([t for a, t in instructions if int(target[1], 16) <= a <= address])
    return len(max(loops, key=lambda loop: (sum("MMA" in t or "FFMA" in t for t in loop), -len(loop))))


VARIANTS = {
    "16 heads": {},
    "groups of 8": {"GROUP_SLOTS": 8, "HEADS": 8},
    "6 heads, bidirectional": {"GROUP_SLOTS": 8, "HEADS": 6, "IS_CAUSAL": False},
    "window": {"HAS_WINDOW": True},
    "static base": {"form": {"BASE": 1}},
    "query-wise": {"form": {"KEY_RANK": 0, "KEY_GATE": 0}},
    "mask of keys": {"HAS_MASK": True},
    "mask of keys, groups of 8": {"HAS_MASK": True, "GROUP_SLOTS": 8, "HEADS": 8},
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
