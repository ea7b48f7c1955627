"""Register layouts of one warp, and conversions between them without communication between lanes.

A tile is 16 keys x 16 heads of one query: operand A of the tensor-core product m16n8k16. Lane 4g + t has the keys 2g
and 2g + 1 (rows g and g + 8 of the operand) of the heads 2t, 2t + 1, 2t + 8 and 2t + 9. An accumulator has the same
heads in the same lanes, so that the result of a product is the operand of the next one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

ACCUMULATOR = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, ACCUMULATOR, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, ACCUMULATOR, 2))
# [8, 2, 16]: pairs of adjacent keys in memory, which a lane loads together, and heads
MEMORY = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1, 0], [0, 0, 1], [0, 0, 8]],
        lane_bases=[[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[],
        block_bases=[],
        shape=[8, 2, 16],
    )
)
PACKED = gl.constexpr(gl.BlockedLayout([8], [32], [1], [0]))  # 16 bytes of a lane

ROWS = gl.constexpr(gl.SliceLayout(1, ACCUMULATOR))
COLUMNS = gl.constexpr(gl.SliceLayout(0, ACCUMULATOR))
MEMORY_HEADS = gl.constexpr(gl.SliceLayout(0, gl.SliceLayout(1, MEMORY)))
MEMORY_PAIRS = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(2, MEMORY)))
MEMORY_KEYS = gl.constexpr(gl.SliceLayout(0, gl.SliceLayout(2, MEMORY)))


@gluon.jit
def memory_keys():
    """Return the keys of a tile in memory layout [8, 2, 1], from 0."""
    pair = gl.expand_dims(gl.expand_dims(gl.arange(0, 8, MEMORY_PAIRS), 1), 2)
    return pair * 2 + gl.expand_dims(gl.expand_dims(gl.arange(0, 2, MEMORY_KEYS), 0), 2)


@gluon.jit
def along_heads(x):
    """Expand values of heads [16] in memory layout to [1, 1, 16]."""
    return gl.expand_dims(gl.expand_dims(x, 0), 1)


@gluon.jit
def row_keys():
    """Return the keys of the rows of an operand or accumulator [16], from 0."""
    row = gl.arange(0, 16, ROWS)
    return row % 8 * 2 + row // 8


@gluon.jit
def from_memory(raw):
    """Turn a loaded tile [8, 2, 16] into a left operand [16 keys, 16 heads]."""
    return gl.convert_layout(gl.reshape(gl.permute(raw, [1, 0, 2]), [16, 16]), LEFT, assert_trivial=True)


@gluon.jit
def to_memory(x):
    """Turn an accumulator [16 keys, 16 heads] into memory layout [8, 2, 16]."""
    return gl.convert_layout(gl.permute(gl.reshape(x, [2, 8, 16]), [1, 0, 2]), MEMORY, assert_trivial=True)


@gluon.jit
def to_left(x, DTYPE: gl.constexpr):
    """Round an accumulator to a left operand."""
    return gl.convert_layout(x.to(DTYPE), LEFT, assert_trivial=True)


@gluon.jit
def widen(x):
    """Convert a left operand to float32 in the layout of accumulators."""
    x = gl.convert_layout(x, ACCUMULATOR, assert_trivial=True)
    if x.dtype == gl.bfloat16:  # two elements of a register per instruction
        return gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], gl.float32, is_pure=True, pack=2
        )
    else:
        return x.to(gl.float32)


@gluon.jit
def load_packed(pointers):
    """Load a tile of weights [256] that was packed in the order of a left operand: 16 bytes per lane."""
    raw = gl.load(pointers)  # [key // 2, head // 2 % 4, head // 8, key % 2, head % 2]
    tile = gl.reshape(gl.permute(gl.reshape(raw, [8, 4, 2, 2, 2]), [3, 0, 2, 1, 4]), [16, 16])
    return gl.convert_layout(tile, LEFT, assert_trivial=True)


@gluon.jit
def right_rows():
    """Return the rows of a right operand [16, 1], from 0."""
    return gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, RIGHT)), 1)


@gluon.jit
def right_columns():
    """Return the columns of a right operand [1, 16], from 0."""
    return gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, RIGHT)), 0)


@gluon.jit
def right_identity(DTYPE: gl.constexpr):
    """Return the identity as a right operand."""
    return gl.where(right_rows() == right_columns(), 1.0, 0.0).to(DTYPE)


@gluon.jit
def left_identity(DTYPE: gl.constexpr):
    """Return the identity as a left operand."""
    row = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, LEFT)), 1)
    return gl.where(row == gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, LEFT)), 0), 1.0, 0.0).to(DTYPE)


@gluon.jit
def zeros():
    """Return an accumulator of zeros."""
    return gl.zeros([16, 16], gl.float32, ACCUMULATOR)


PRODUCT = (
    "mma.sync.aligned.m16n8k8.row.col.f32.DTYPE.DTYPE.f32 {$0, $1, $2, $3}, {$8, $9}, {$12}, {$16, $17, $18, $19};"
    "mma.sync.aligned.m16n8k8.row.col.f32.DTYPE.DTYPE.f32 {$4, $5, $6, $7}, {$10, $11}, {$15}, {$20, $21, $22, $23};"
)
PRODUCT_BF16, PRODUCT_FP16 = (gl.constexpr(PRODUCT.replace("DTYPE", name)) for name in ("bf16", "f16"))
OPERANDS = gl.constexpr(",".join(["=&f"] * 8 + ["r"] * 8 + ["f"] * 8))


@gluon.jit
def times(x, right, total, HAS_HALVES: gl.constexpr):
    """Add the product of a left and a right operand to an accumulator.

    With halves the right operand is block-diagonal with two blocks [8, 8], and its zeros are skipped.
    """
    if HAS_HALVES:
        x = gl.convert_layout(x, ACCUMULATOR, assert_trivial=True)
        right = gl.convert_layout(gl.permute(right, [1, 0]), ACCUMULATOR)
        product: gl.constexpr = PRODUCT_BF16 if x.dtype == gl.bfloat16 else PRODUCT_FP16
        return gl.inline_asm_elementwise(product, OPERANDS, [x, right, total], gl.float32, is_pure=True, pack=8)
    else:
        return mma_v2(x, right, total)


@gluon.jit
def transpose(x, identity, DTYPE: gl.constexpr):
    """Transpose a left operand by a product with the identity, which is exact: an accumulator."""
    return mma_v2(identity, gl.convert_layout(gl.permute(x, [1, 0]), RIGHT), zeros()).to(DTYPE)


@gluon.jit
def outer(d, x, y, identity, DTYPE: gl.constexpr):
    """Add x^T y to an accumulator [16 heads, 16 heads]; both are left operands [16 keys, 16 heads]."""
    x_t = gl.convert_layout(transpose(x, identity, DTYPE), LEFT, assert_trivial=True)
    y_t = gl.convert_layout(gl.permute(transpose(y, identity, DTYPE), [1, 0]), RIGHT)
    return mma_v2(x_t, y_t, d)
