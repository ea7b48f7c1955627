"""Problems for the Gluon kernels, which cover all forms of calls that the kernels support."""

from typing import NamedTuple

import torch

from tests.dcmha.inputs import Case

LONG_ROWS = {"SHORT_ROW": 0}
SMALL_CHUNKS = {"WORKSPACE_MIB": 1 / 16, "MIN_QUERIES": 16, "BLOCK_QUERIES": 16}


class Problem(NamedTuple):
    """Case and the form in which the kernels receive it.

    Attributes:
        case: Shape and features of the call.
        dtype: Dtype of the operands.
        constants: Constants that divide the call into several chunks, or select the kernels for long rows.
        has_large_values: Whether large values replace the boolean mask. Most of them are equal for all keys of a query.
        has_hidden_nan: Whether the first batch row, whose keys are all hidden, contains NaN. Only the other rows are
            compared.
        is_displaced: Whether tensors start at addresses that are not aligned to loads of 16 bytes.
    """

    case: Case
    dtype: torch.dtype = torch.bfloat16
    constants: dict[str, float] = {}
    has_large_values: bool = False
    has_hidden_nan: bool = False
    is_displaced: bool = False


QUICK = {
    "16 heads, causal, chunks of long rows": Problem(
        Case(B=1, T=140, S=140, H=16, is_causal=True, branches="qkg"),
        constants=LONG_ROWS | SMALL_CHUNKS | {"WORKSPACE_MIB": 1 / 3, "MIN_QUERIES": 64},
    ),
    "6 heads, 3 rows, floating mask, dropout": Problem(
        Case(B=3, T=37, S=50, H=6, mask="bias B1TS", dropout_p=0.6), dtype=torch.float16
    ),
    "shared keys, blocks of a window": Problem(
        Case(B=2, T=50, S=50, H=8, shared=4, window_size=9, is_causal=True, branches="qkg"), constants=SMALL_CHUNKS
    ),
    "groups, documents, mask of each head": Problem(
        Case(B=1, T=33, S=33, H=12, G=3, has_documents=True, mask="heads", branches="qkg")
    ),
}
SLOW = {
    "6 heads, long rows, dropout": Problem(
        Case(B=3, T=37, S=50, H=6, mask="bool", dropout_p=0.4), constants=LONG_ROWS, dtype=torch.float16
    ),
    "16 heads, long rows, blocks of a window": Problem(
        Case(B=2, T=70, S=70, H=16, window_size=17, is_causal=True, branches="qkg"), constants=LONG_ROWS | SMALL_CHUNKS
    ),
    "16 heads, causal, split": Problem(Case(B=1, T=150, S=150, H=16, is_causal=True, branches="qkg")),
    "12 heads in 3 groups": Problem(Case(B=1, T=33, S=33, H=12, G=3, branches="qkg"), dtype=torch.float16),
    "window, 4 heads, long": Problem(Case(B=1, T=300, S=300, H=4, is_causal=True, window_size=40, branches="qkg")),
    "window to both sides": Problem(Case(B=2, T=70, S=70, H=3, window_size=9, branches="qkg"), constants=SMALL_CHUNKS),
    "mask of keys": Problem(Case(B=2, T=35, S=35, H=16, mask="keys", branches="qkg")),
    "bias of heads": Problem(Case(B=2, T=33, S=33, H=6, mask="bias 1HTS", branches="qkg")),
    "documents of two rows in a tile": Problem(
        Case(B=2, T=35, S=35, H=8, has_documents=True, is_causal=True, branches="qkg")
    ),
    "dropout": Problem(Case(B=1, T=37, S=37, H=16, dropout_p=0.3, is_causal=True, branches="qkg")),
    "shared keys": Problem(Case(B=2, T=37, S=37, H=8, shared=2, is_causal=True, branches="qkg")),
    "fewer queries than keys": Problem(Case(B=1, T=21, S=50, H=16, D=32, is_causal=True, branches="qkg")),
    "more queries than keys": Problem(Case(B=2, T=30, S=19, H=4, D=32, is_causal=True, branches="qkg")),
    "24 heads, blocks of a window, dropout": Problem(
        Case(B=2, T=50, S=50, H=24, window_size=9, is_causal=True, dropout_p=0.3, branches="qkg"),
        constants=SMALL_CHUNKS,
    ),
    "24 heads": Problem(Case(B=1, T=24, S=24, H=24, is_causal=True, branches="qkg")),
    "base alone": Problem(Case(B=3, T=33, S=33, H=6, branches="b")),
    "large values in the mask": Problem(Case(B=2, T=35, S=35, H=6, mask="bool", branches="qkg"), has_large_values=True),
    "large values in the mask, long rows": Problem(
        Case(B=1, T=35, S=35, H=16, mask="bool", is_causal=True, branches="qkg"),
        constants=LONG_ROWS,
        has_large_values=True,
    ),
    "NaN in a row of a tile": Problem(Case(B=2, T=20, S=20, H=4, mask="keys", branches="qkg"), has_hidden_nan=True),
    "window, more queries than keys": Problem(
        Case(B=1, T=72, S=40, H=4, D=8, window_size=9, is_causal=True, branches="qkg"), constants=SMALL_CHUNKS
    ),
    "6 heads, boolean mask": Problem(Case(B=3, T=33, S=33, H=6, mask="bool", is_causal=True, branches="qkg")),
    "tensors at odd addresses": Problem(Case(B=2, T=33, S=33, H=8, mask="bool", has_documents=True), is_displaced=True),
    "many more queries than keys": Problem(
        Case(B=1, T=60, S=13, H=16, is_causal=True, branches="qkg"), constants={"WORKSPACE_MIB": 1 / 64}
    ),
    "rank 4, post alone, keys alone": Problem(Case(B=1, T=20, S=20, H=16, R=4, branches="kg", compositions="post")),
}
LONG = {
    "12 heads, long rows": Problem(Case(B=1, T=37, S=37, H=12), constants=LONG_ROWS),
    "8 heads, long rows, window, documents": Problem(
        Case(B=2, T=70, S=70, H=8, window_size=17, has_documents=True, branches="qkg"), constants=LONG_ROWS
    ),
    "16 heads, chunks of short rows": Problem(
        Case(B=2, T=140, S=140, H=16, is_causal=True, branches="qkg"), constants=SMALL_CHUNKS
    ),
    "16 heads": Problem(Case(B=1, T=40, S=40, H=16, D=32)),
    "window, rows of one chunk": Problem(Case(B=1, T=70, S=70, H=16, is_causal=True, window_size=17, branches="qkg")),
    "window, other queries than keys": Problem(
        Case(B=3, T=130, S=150, H=6, is_causal=True, window_size=40, branches="qkg"), constants={"BLOCK_QUERIES": 16}
    ),
    "several rows and chunks": Problem(
        Case(B=2, T=60, S=60, H=16, is_causal=True, branches="qkg"), constants=SMALL_CHUNKS
    ),
    "boolean mask, causal": Problem(Case(B=3, T=35, S=35, H=6, mask="bool", is_causal=True, branches="qkg")),
    "floating mask with -inf": Problem(Case(B=2, T=35, S=35, H=8, mask="float-inf", branches="qkg")),
    "bias of all": Problem(Case(B=2, T=33, S=33, H=16, mask="bias BHTS", branches="qkg")),
    "documents to both sides": Problem(Case(B=1, T=37, S=37, H=16, has_documents=True, branches="qkg")),
    "32 heads": Problem(Case(B=1, T=24, S=24, H=32, is_causal=True, branches="qkg")),
    "32 heads, documents, floating mask": Problem(
        Case(B=1, T=33, S=33, H=32, mask="bias B1TS", has_documents=True), dtype=torch.float16
    ),
    "48 heads, causal, split": Problem(Case(B=2, T=150, S=150, H=48, is_causal=True, branches="kg")),
    "40 heads, rank 1": Problem(Case(B=1, T=24, S=24, H=40, R=1, branches="qk")),
    "64 heads": Problem(Case(B=1, T=18, S=18, H=64, branches="qkg")),
    "base and queries, 32 heads": Problem(Case(B=1, T=20, S=20, H=32, branches="qb")),
    "pre alone": Problem(Case(B=2, T=20, S=20, H=16, branches="qkg", compositions="pre")),
    "rank 0, gates": Problem(Case(B=2, T=20, S=20, H=5, R=0, branches="qkg")),
    "one head": Problem(Case(B=5, T=20, S=20, H=1, branches="qkg")),
}
CASES = QUICK | SLOW | LONG
