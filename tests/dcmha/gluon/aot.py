"""Compilation of the Gluon kernels for a GPU that need not be present: registers, spills, shared memory, barriers.

python -m tests.dcmha.gluon.aot CAPABILITY VARIANT...
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from dcmha.impl.gluon import kernels, key_kernel, short_kernels, wide_key_kernel
from dcmha.impl.gluon.indexing import KernelConfig, Packed, Sizes
from dcmha.impl.gluon.launch import options_of
from dcmha.impl.gluon.masking import Masks
from dcmha.impl.gluon.mixing import ComposeSpec
from tests.ptx.launch import is_aligned

KERNELS = {
    kernel.fn.__name__: kernel
    for kernel in (
        kernels.composed_weights,
        kernels.post_gradients,
        kernels.pre_gradients,
        key_kernel.key_gradients,
        wide_key_kernel.wide_key_gradients,
        short_kernels.short_weights,
        short_kernels.short_gradients,
    )
}
NARROW = ("short_weights", "short_gradients", "key_gradients")  # up to 16 heads
WIDE = ("wide_key_gradients",)  # more than 16 heads
TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32"}
SPEC = ComposeSpec(QUERY_RANK=2, QUERY_GATE=1, KEY_RANK=2, KEY_GATE=1, BASE=0)
KIND = KernelConfig(
    GROUP_SLOTS=16,
    HEADS=16,
    BLOCKS=1,
    NUM_GROUPS=1,
    NUM_HEADS=16,
    SHARED=1,
    IS_CAUSAL=True,
    HAS_WINDOW=False,
    HAS_DOCUMENTS=False,
    MASK=0,
    MASK_GRADIENT=False,
    HAS_DROPOUT=False,
    BAND=0,
    ADDS=True,
    SPLITS=False,
    DTYPE=gl.bfloat16,
)


VARIANTS = {
    "16 heads": {},
    "6 heads, bidirectional": {"GROUP_SLOTS": 8, "HEADS": 6, "NUM_HEADS": 6, "IS_CAUSAL": False},
    "12 heads": {"HEADS": 12, "NUM_HEADS": 12},
    "window_size": {"HAS_WINDOW": True, "BAND": 128},
    "float16": {"DTYPE": gl.float16},
    "rank 1": {"spec": ComposeSpec(1, 0, 1, 0, 0)},
    "rank 4": {"spec": ComposeSpec(4, 1, 4, 1, 0)},
    "query-wise": {"spec": ComposeSpec(2, 1, 0, 0, 0)},
    "key-wise": {"spec": ComposeSpec(0, 0, 2, 1, 0)},
    "32 heads": {"GROUP_SLOTS": 32, "HEADS": 32, "NUM_HEADS": 32, "BLOCKS": 2},
}


class Resources(NamedTuple):
    """Resources of one kernel.

    Attributes:
        registers: Registers per thread.
        spills: Bytes of spilled registers per thread.
        shared: Bytes of shared memory per program.
        barriers: Number of instructions that wait for other warps.
    """

    registers: int
    spills: int
    shared: int
    barriers: int


def resources(name: str, capability: int, spec: ComposeSpec = SPEC, **kind: object) -> Resources:
    """Compile a kernel with its launch options for compute capability 80, 90, 100, ... and count its resources."""
    compiled = compile_kernel(name, capability, spec, **kind)
    usage, code = (_dump(compiled.asm["cubin"], what) for what in ("--dump-resource-usage", "--dump-sass"))
    return Resources(
        int(re.search(r"REG:(\d+)", usage)[1]),
        int(re.search(r"STACK:(\d+)", usage)[1]),
        compiled.metadata.shared,
        len(re.findall(r"\bBAR\.", code)),
    )


def compile_kernel(name: str, capability: int, spec: ComposeSpec = SPEC, **kind: object) -> CompiledKernel:
    """Compile a kernel for one kind of call."""
    config = KIND._replace(**kind)
    kernel, constants = KERNELS[name], {"KIND": config, "PRE": spec, "POST": spec, "SPEC": spec}
    is_wide = config.BLOCKS > 1
    constants["PART"] = wide_key_kernel.Part(0, 2, True, 1.0) if is_wide else key_kernel.Part(True, True)
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature, constexprs, attributes = {}, {}, {}
    for index, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument], constexprs[(index,)] = "constexpr", constants[argument]
        else:
            value = _argument(argument, config)
            signature[argument] = _types((index,), argument, value, constexprs, attributes)
    source = GluonASTSource(kernel, signature, constexprs, attributes)
    options = options_of(name, config)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def _argument(name: str, config: KernelConfig) -> object:
    """Return an argument of the same type as in a call."""
    data = torch.empty(1, dtype=torch.bfloat16 if gl.bfloat16 == config.DTYPE else torch.float16)
    match name:
        case "lse" | "delta":
            return data.float()
        case "d_base" | "pre_base" | "post_base" | "dy":
            return None
        case "d_key" | "d_pre_key" | "d_post_key":
            return data.float() if config.ADDS else data
        case "p":
            return data if config.BLOCKS > 1 else None
        case "pre" | "post" | "weights":
            return Packed(data, data, None)
        case "masks":
            return Masks(*(None,) * len(Masks._fields))
        case "sizes":
            return Sizes(*(1,) * len(Sizes._fields))
    return data


def _types(place: tuple, name: str, value: object, constexprs: dict, attributes: dict) -> object:
    """Return Triton's names of the types of an argument. Record its constants and its multiples of 16."""
    if isinstance(value, tuple):
        parts = zip(value._fields, value, strict=True)
        return type(value)(*(_types((*place, n), *part, constexprs, attributes) for n, part in enumerate(parts)))
    if value is None:
        constexprs[place] = None
        return "constexpr"
    name_of_type = TYPES[value.dtype] if isinstance(value, torch.Tensor) else "i32"
    if is_aligned(name, name_of_type):
        attributes[place] = [["tt.divisibility", 16]]
    return name_of_type


def _dump(cubin: bytes, what: str) -> str:
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(folder / "cuobjdump"), what, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main(capability: str, *variants: str) -> None:
    """Print the resources of every kernel for some variants as JSON."""
    rows = {}
    for variant in variants:
        for name in KERNELS:
            if name in (NARROW if VARIANTS[variant].get("BLOCKS", 1) > 1 else WIDE):
                continue
            rows[f"{variant}: {name}"] = resources(name, int(capability), **VARIANTS[variant])._asdict()
    print(json.dumps(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
