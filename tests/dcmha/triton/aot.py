"""Compilation of the kernels for a GPU that need not be present: registers, spills, shared memory and instructions."""

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

from dcmha import SideWeights
from dcmha.impl.triton import decode, decode_kernels, kernels, launch
from dcmha.impl.triton.head_mixing import ComposeSpec, KernelConfig, Packed
from dcmha.impl.triton.masking import Masks
from dcmha.impl.triton.packing import WHOLE_BLOCKS, slots_of_group

KERNELS = tuple(launch.TILES)
FLOATS = ("lse", "delta", "outputs")
STRIDES = tuple(f"{x}_{axis}" for x in "kv" for axis in ("row", "head", "token"))
ALIGNED = ("num_keys", *STRIDES)  # sizes that are multiples of 16; the others are not specialized
KIND = KernelConfig(
    GROUP_SLOTS=16,
    HEADS=16,
    BLOCKS=1,
    IS_CAUSAL=True,
    HAS_WINDOW=False,
    HAS_DOCUMENTS=False,
    MASK=0,
    MASK_HEADS=False,
    MASK_QUERIES=False,
    MASK_GRADIENT=False,
    HAS_DROPOUT=False,
    DOT=None,
)
SPEC = ComposeSpec(QUERY_RANK=2, QUERY_GATE=1, KEY_RANK=2, KEY_GATE=1, BASE=0, FACTORED=0)
DOTS = {"bf16": triton.language.bfloat16, "fp16": triton.language.float16, "fp32": triton.language.float32}


class Resources(NamedTuple):
    """Resources of one kernel.

    Attributes:
        registers: Registers per thread.
        spills: Bytes of spilled registers per thread.
        shared: Bytes of shared memory per block.
        instructions: Instructions of the main loop per 32 elements (one query, key and head each), which are the issue
            slots of a warp.
    """

    registers: int
    spills: int
    shared: int
    instructions: float


def compile_kernel(
    name: str,
    capability: int,
    dtype: str = "bf16",
    tile: launch.Tile | None = None,
    form: dict[str, int] | None = None,
    **kind,
) -> Resources:
    """Compile a kernel with its launch options for compute capability 80, 90, 100, ...

    Args:
        name: Name of the kernel.
        capability: Compute capability.
        dtype: Dtype of the operands.
        tile: Tile to use instead of the default one.
        form: Fields of both compositions that differ from `SPEC`.
        **kind: Fields of the call that differ from `KIND`.
    """
    kind, form = _kind(dtype, **kind), _form(form or {}, dtype, **kind)
    tile = tile or launch.tile_of(name, 4 if dtype == "fp32" else 2, kind)
    constants = {"KIND": kind, "PRE": form, "POST": form, "BLOCK_M": tile.queries, "BLOCK_N": tile.keys}
    return _compile(getattr(kernels, name), capability, dtype, constants, *tile[2:])


def compile_decoding(
    name: str,
    capability: int,
    dtype: str = "bf16",
    num_queries: int = 1,
    head_dim: int = 128,
    form: dict[str, int] | None = None,
    **kind,
) -> Resources:
    """Compile a decoding kernel with a mask of keys in the same way."""
    kind, form = _kind(dtype, MASK=1, **kind), _form(form or {}, dtype, **kind)
    constants = decode.decode_tile(name, num_queries, head_dim, 4 if dtype == "fp32" else 2, kind) | {
        "KIND": kind,
        "PRE": form,
        "POST": form,
    }
    return _compile(getattr(decode_kernels, name), capability, dtype, constants, decode.NUM_WARPS, decode.NUM_STAGES)


def _compile(
    kernel, capability: int, dtype: str, constants: dict, warps: int, stages: int, registers: int | None = None
) -> Resources:
    signature, constexprs, attributes = {}, {}, {}
    for index, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument], constexprs[(index,)] = "constexpr", constants[argument]
            continue
        signature[argument] = kernel_config = _type_of(argument, dtype, constants)
        for place, part in _parts((index,), kernel_config):
            if part == "constexpr":
                constexprs[place] = None
            elif part.startswith("*") or argument in ALIGNED:
                attributes[place] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    options = launch.launch_options(True, warps, stages, registers)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    usage, code = (_dump(compiled.asm["cubin"], what) for what in ("--dump-resource-usage", "--dump-sass"))
    elements = constants["BLOCK_M"] * constants["BLOCK_N"] * 16 * constants["KIND"].BLOCKS / (32 * warps)  # per thread
    return Resources(
        int(re.search(r"REG:(\d+)", usage)[1]),
        int(re.search(r"STACK:(\d+)", usage)[1]),
        compiled.metadata.shared,
        round(_main_loop(code) / elements, 1),
    )


def _form(fields: dict[str, int], dtype: str, **kind) -> ComposeSpec:
    """Return `SPEC` with other fields, and with its derived field."""
    form = SPEC._replace(**fields)
    return form._replace(FACTORED=int(_kind(dtype, **kind).BLOCKS > WHOLE_BLOCKS and not form.BASE))


def _kind(dtype: str, **kind) -> KernelConfig:
    """Return `KIND` with other fields, and with its derived fields."""
    kind = KIND._replace(DOT=DOTS[dtype], **kind)
    slots = slots_of_group(kind.HEADS)
    return kind._replace(GROUP_SLOTS=slots, BLOCKS=max(1, slots // 16))


def _type_of(argument: str, dtype: str, constants: dict) -> str | tuple:
    """Return the type of an argument at launch. A tuple has one type per field."""
    kind, pointer = constants["KIND"], f"*{dtype}"
    if argument in ("pre", "post"):
        form = constants[argument.upper()]
        sides = [(form.QUERY_RANK, form.QUERY_GATE), (form.KEY_RANK, form.KEY_GATE)]
        if "D" in constants:
            sides = [SideWeights(*(pointer if part else "constexpr" for part in (r, r, gate))) for r, gate in sides]
        else:
            sides = [pointer if any(side) else "constexpr" for side in sides]
        return Packed(*sides, pointer if form.BASE else "constexpr")
    if argument == "masks":
        document_ids = "*i32" if kind.HAS_DOCUMENTS else "constexpr"
        pairs = ("constexpr", "*u8", pointer)[kind.MASK]
        return Masks(pairs, document_ids, document_ids, "*i64" if kind.HAS_DROPOUT else "constexpr")
    if argument in FLOATS or argument.startswith("d_") or (argument == "x" and "D" in constants):
        return "*fp32"
    if argument == "dy" and not kind.MASK_GRADIENT:
        return "constexpr"
    if argument in ("x", "da", "dy", "q", "k", "v"):
        return pointer
    return "fp32" if argument in ("keep_scale", "scale") else "i32"


def _parts(place: tuple[int, ...], kernel_config: str | tuple) -> list[tuple[tuple[int, ...], str]]:
    """Return the positions of all parts of an argument and their types."""
    if isinstance(kernel_config, tuple):
        return [part for number, inner in enumerate(kernel_config) for part in _parts((*place, number), inner)]
    return [(place, kernel_config)]


def _dump(cubin: bytes, what: str) -> str:
    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([program, what, file.name], capture_output=True, text=True).stdout


def _main_loop(code: str) -> int:
    """Count the instructions of the shortest loop among the loops with the most matrix products."""
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", code)
    instructions = [(int(address, 16), text) for address, text in found]
    loops = []
    for address, text in instructions:
        target = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
        if target and int(target[1], 16) < address:
            loops.append([t for a, t in instructions if int(target[1], 16) <= a <= address])
    return len(max(loops, key=lambda loop: (sum("MMA" in t or "FFMA" in t for t in loop), -len(loop))))


QUERY_WISE = {"form": {"KEY_RANK": 0, "KEY_GATE": 0}}
BIAS = {"MASK": 2, "MASK_HEADS": True, "MASK_QUERIES": True, "MASK_GRADIENT": True}
VARIANTS = {
    "16 heads": {},
    "groups of 8": {"HEADS": 8},
    "6 heads, bidirectional": {"HEADS": 6, "IS_CAUSAL": False},
    "24 heads": {"HEADS": 24},
    "32 heads": {"HEADS": 32},
    "40 heads": {"HEADS": 40},
    "52 heads": {"HEADS": 52},
    "32 heads, static base": {"HEADS": 32, "form": {"BASE": 1}},
    "32 heads, query-wise": {"HEADS": 32} | QUERY_WISE,
    "window_size": {"HAS_WINDOW": True},
    "static base": {"form": {"BASE": 1}},
    "query-wise": QUERY_WISE,
    "mask of keys": {"MASK": 1},
    "mask of keys, groups of 8": {"MASK": 1, "HEADS": 8},
    "mask of pairs, 3 heads": {"MASK": 1, "MASK_QUERIES": True, "HEADS": 3, "IS_CAUSAL": False},
    "bias, 12 heads": {"HEADS": 12, "IS_CAUSAL": False} | BIAS,
    "bias, 3 heads": {"HEADS": 3, "IS_CAUSAL": False} | BIAS,
    "bias, 32 heads": {"HEADS": 32} | BIAS,
    "document_ids": {"HAS_DOCUMENTS": True},
    "documents, 32 heads": {"HAS_DOCUMENTS": True, "HEADS": 32},
    "dropout": {"HAS_DROPOUT": True},
    "dropout, 32 heads": {"HAS_DROPOUT": True, "HEADS": 32},
    "float16": {"dtype": "fp16"},
    "float32": {"dtype": "fp32"},
    "float32, 32 heads": {"dtype": "fp32", "HEADS": 32},
}


DECODING = {  # few queries over many keys
    "decoding, 16 heads": {"head_dim": 64},
    "decoding, 6 heads": {"HEADS": 6, "head_dim": 64},
    "decoding, 32 heads": {"HEADS": 32, "head_dim": 80},
    "decoding, 32 heads, 8 queries": {"HEADS": 32, "num_queries": 8},
    "decoding, 40 heads": {"HEADS": 40},
    "decoding, float32": {"dtype": "fp32"},
}


def main(capability: str, *variants: str) -> None:
    """Print the resources of every kernel for some variants as JSON."""
    rows = {}
    for variant in variants:
        if variant in DECODING:
            for name in decode.STEPS:
                rows[f"{variant}: {name}"] = compile_decoding(name, int(capability), **DECODING[variant])._asdict()
            continue
        for name in KERNELS:
            if "query-wise" not in variant or name != "key_gradients":
                rows[f"{variant}: {name}"] = compile_kernel(name, int(capability), **VARIANTS[variant])._asdict()
    print(json.dumps(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
