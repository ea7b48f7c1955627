"""The PTX executor on kernels of a few instructions."""

import pytest
import torch

from tests.ptx.errors import PTXError
from tests.ptx.execute import run

REGISTERS = ".reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<29>; .reg .b64 %rd<9>;"
PLACE = """
    ld.param.b64 %rd1, [test_param_0];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    mad.lo.s32 %r3, %r2, 32, %r1;
    mad.wide.s32 %rd2, %r3, 4, %rd1;
    mad.wide.s32 %rd3, %r1, 4, %rd1;
"""  # rd2 and rd3: addresses of the int32 of a thread and of a lane


def execute(body: str, *tensors: torch.Tensor, programs: int = 1) -> None:
    """Run a kernel with tensors as its parameters."""
    parameters = ", ".join(f".param .u64 test_param_{n}" for n in range(len(tensors)))
    lines = "\n".join(["{", REGISTERS, PLACE, body, "ret;", "}"])
    run(f".visible .entry test({parameters})\n.reqntid 32\n{lines}", (programs, 1, 1), tensors)


def integers(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def load_all(first: int, count: int, parameter: int) -> str:
    """Return instructions that load the numbers [count, 32] of each lane into registers."""
    lines = [f"ld.param.b64 %rd4, [test_param_{parameter}];", "mad.wide.u32 %rd5, %r1, 4, %rd4;"]
    lines += [f"ld.global.b32 {{ %r{first + n} }}, [ %rd5 + {128 * n} ];" for n in range(count)]
    return "\n".join(lines)


def test_each_program_and_lane_writes_its_own_element():
    out = integers(3, 32)
    execute("st.global.b32 [ %rd2 + 0 ], { %r3 };", out, programs=3)
    assert out.flatten().tolist() == list(range(96))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "st.global.b32 [ %rd2 + 4 ], { %r3 };",
            "out of bounds: program 0, lane 31 accesses 4 bytes at 128 of test_param_0",
        ),
        ("ld.global.b32 { %r4 }, [ %rd2 + -4 ];", "out of bounds: program 0, lane 0"),
        ("mov.b64 %rd2, 0; ld.global.b32 { %r4 }, [ %rd2 + 0 ];", "out of bounds"),
        ("ld.global.v2.b32 { %r4, %r5 }, [ %rd1 + 4 ];", "misaligned: program 0, lane 0 accesses 8 bytes at 4"),
        ("st.global.b32 [ %rd1 + 0 ], { %r1 };", "race: program 0, lane 0 writes what program 0, lane 31 wrote"),
        ("st.global.b32 [ %rd2 + 0 ], { %r1 }; ld.global.b32 { %r4 }, [ %rd1 + 0 ];", "race: .* lane 1 reads"),
        ("add.s32 %r4, %r5, 1;", "%r5 was never written"),
        ("popc.b32 %r4, %r1;", r"test: unknown instruction: popc\.b32"),
        ("bar.sync 0;", "shared memory and barriers"),
        ("ld.shared.b32 %r4, [%r1];", "shared memory and barriers"),
        ("setp.lt.s32 %p1, %r1, 5;\n@%p1 bra $end;\n$end:", "divergence: program 0, lane 5"),
    ],
)
def test_invalid_kernels_raise_error_with_cause(body, message):
    with pytest.raises(PTXError, match=message):
        execute(body, integers(32))


def test_error_names_the_source_line():
    body = (
        '.loc 1 7 2, function_name $L, inlined_at 1 9 1\nld.global.b32 { %r4 }, [ %rd2 + 4 ];\n.file 1 "/a/kernel.py"'
    )
    with pytest.raises(PTXError, match=r"^test: .*ld\.global.*kernel\.py:7 inlined at kernel\.py:9"):
        execute(body, integers(32))


@pytest.mark.parametrize("body", ["st.global.b32 [ %rd3 + 0 ], { %r1 };", "ld.global.b32 { %r4 }, [ %rd3 + 0 ];"])
def test_writes_to_memory_accessed_by_another_program_raise_error(body):
    write = "setp.eq.s32 %p1, %r2, 1;\n@%p1 st.global.b32 [ %rd3 + 0 ], { %r1 };"
    execute(body, integers(32))
    execute(write, integers(32), programs=2)
    with pytest.raises(PTXError, match="race: program ., lane 0 writes"):
        execute(f"{body}\n{write}" if "ld" in body else body, integers(32), programs=2)


def test_access_beyond_a_tensor_in_a_shared_storage_raises_error():
    storage = integers(96)
    execute("st.global.b32 [ %rd2 + 0 ], { %r3 };", storage[:32], storage[32:])
    with pytest.raises(PTXError, match="out of bounds"):
        execute("st.global.b32 [ %rd2 + 128 ], { %r3 };", storage[:32], storage[32:])


def test_lanes_may_write_the_same_value_to_one_address():
    out = integers(1)
    execute("mov.b32 %r4, 7; st.global.b32 [ %rd1 + 0 ], { %r4 };", out)
    assert out.item() == 7


def test_predicated_loads_preserve_old_values():
    out, x = integers(32), torch.arange(1, 33, dtype=torch.int32)
    load = load_all(4, 1, 1).replace("ld.global", "setp.lt.s32 %p1, %r1, 5;\nmov.b32 %r4, -1;\n@!%p1 ld.global")
    execute(f"{load}\nst.global.b32 [ %rd2 + 0 ], {{ %r4 }};", out, x)
    assert out.tolist() == [-1] * 5 + list(range(6, 33))


def test_programs_may_leave_a_loop_after_different_iterations():
    out = integers(150, 32)
    body = """
        mov.b32 %r4, 0;
        setp.eq.s32 %p1, %r2, 0;
        @%p1 bra $after;
    $loop:
        add.s32 %r4, %r4, 3;
        mul.lo.s32 %r5, %r2, 3;
        setp.lt.s32 %p1, %r4, %r5;
        @%p1 bra $loop;
    $after:
        st.global.b32 [ %rd2 + 0 ], { %r4 };
    """
    execute(body, out, programs=150)
    assert torch.equal(out, 3 * torch.arange(150, dtype=torch.int32)[:, None].expand(-1, 32))


def test_butterfly_shuffle_exchanges_values_between_lanes():
    out = integers(32)
    execute("shfl.sync.bfly.b32 %r4, %r1, 5, 31, -1; st.global.b32 [ %rd2 + 0 ], { %r4 };", out)
    assert out.tolist() == [lane ^ 5 for lane in range(32)]


def test_ordered_and_unordered_comparisons_of_nan_match_ptx():
    out, x = integers(32), torch.tensor([float("nan"), 1.0, 2.0]).repeat(11)[:32]
    results = []
    for test in ("lt", "ltu", "ne", "neu", "ge"):
        compare = f"setp.{test}.f32 %p1, %r4, 0f40000000; selp.b32 %r5, 1, 0, %p1;"
        execute(f"{load_all(4, 1, 1)}\n{compare}\nst.global.b32 [ %rd2 + 0 ], {{ %r5 }};", out, x)
        results.append(out[:3].tolist())
    assert results == [[0, 1, 0], [1, 1, 0], [0, 1, 0], [1, 1, 0], [0, 0, 1]]


def test_integer_instructions_give_expected_values():
    bodies = {
        "shr.s32 %r4, %r3, 40;": -1,
        "shr.u32 %r4, %r3, 28;": 15,
        "mul.hi.u32 %r4, %r3, -1;": -8,
        "cvt.s64.s32 %rd4, %r3; mul.hi.u64 %rd5, %rd4, %rd4; cvt.u32.u64 %r4, %rd5;": -14,
        "rem.s32 %r4, %r3, 5;": -2,
        "mov.b32 %r5, 0x0001FFFF; add.s16x2 %r4, %r5, %r5;": 0x0002FFFE,
        "mov.b32 %r5, 0x04030201; prmt.b32 %r4, %r5, %r3, 0x3040U;": 0x0401F901,
        "cvt.u16.u32 %rs1, %r3; cvt.s16.s8 %rs2, %rs1; cvt.s32.s16 %r4, %rs2;": -7,
        "mov.b32 %r5, 384; cvt.s8.s32 %rs1, %r5; cvt.s32.s8 %r4, %rs1;": -128,
        "mul.wide.s32 %rd4, %r3, 3; shr.s64 %rd5, %rd4, 32; cvt.u32.u64 %r4, %rd5;": -1,
        "bfe.u32 %r4, %r3, 1, 2;": 0,
        "cvt.s64.s32 %rd4, %r3; setp.lt.s64 %p1, %rd4, 0; selp.b32 %r4, 3, 4, %p1;": 3,
        "mov.b32 {%rs1, %rs2}, %r3; shl.b16 %rs1, %rs1, 1; mov.b32 %r4, {%rs2, %rs1};": -851969,
    }
    for body, expected in bodies.items():
        out = integers(32)
        execute(f"mov.b32 %r3, -7;\n{body}\nst.global.b32 [ %rd2 + 0 ], {{ %r4 }};", out)
        assert out.tolist() == [expected] * 32, body


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bf16"), (torch.float16, "f16")])
def test_fma_of_16_bit_pairs_is_rounded_once(dtype, name):
    torch.manual_seed(0)
    x = torch.randn(3, 64, dtype=torch.float64).to(dtype)
    x[:, 0] = torch.tensor([1.125, 1.34375, -(2.0**-30)]).to(dtype)  # exact result: slightly less than 193.5 / 128
    out = torch.zeros(64, dtype=dtype)
    body = f"fma.rn.{name}x2 %r7, %r4, %r5, %r6;\nst.global.b32 [ %rd2 + 0 ], {{ %r7 }};"
    execute(f"{load_all(4, 3, 1)}\n{body}", out, x)
    exact = x[0].double() * x[1].double() + x[2].double()
    assert torch.equal(out[1:], exact.to(dtype)[1:])
    assert out[0].double() == (193 / 128 if dtype == torch.bfloat16 else exact[0].half().double())


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bf16"), (torch.float16, "f16")])
def test_matrix_product_matches_torch(dtype, name):
    torch.manual_seed(0)
    a, b, c = torch.randn(16, 16).to(dtype), torch.randn(16, 8).to(dtype), torch.randn(16, 8)
    lane, pair, four = torch.arange(32), torch.arange(2), torch.arange(4)[:, None]
    row, column = lane // 4, lane % 4 * 2
    left = a[(row + four % 2 * 8)[..., None], (column + four // 2 * 8)[..., None] + pair]
    right = b[(column + four[:2] * 8)[..., None] + pair, row[:, None]]
    added = c[row + four // 2 * 8, column + four % 2]
    out = torch.zeros(4, 32)
    body = (
        "\n".join(load_all(first, n, which) for first, n, which in ((4, 4, 1), (8, 2, 2), (10, 4, 3)))
        + f"""
    mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32
        {{ %r14, %r15, %r16, %r17 }}, {{ %r4, %r5, %r6, %r7 }}, {{ %r8, %r9 }}, {{ %r10, %r11, %r12, %r13 }};
    """.replace("f32\n       ", "f32")
    )
    stores = [f"st.global.b32 [ %rd2 + {128 * n} ], {{ %r{14 + n} }};" for n in range(4)]
    execute("\n".join([body, *stores]), out, left.contiguous(), right.contiguous(), added)
    product = a.float() @ b.float() + c
    torch.testing.assert_close(out, product[row + four // 2 * 8, column + four % 2])
