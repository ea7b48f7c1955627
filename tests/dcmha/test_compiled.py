"""The chunked implementation under compilation: number of compiled graphs and tracing of several blocks."""

from dataclasses import replace

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd

from dcmha import ComposeWeights, composed_attention
from dcmha.impl import compiled
from dcmha.impl.compiled import blocks, chunking, custom_op
from tests.dcmha.inputs import (
    Case,
    make_documents,
    make_operands,
    output_and_gradients,
    relative_error,
    run,
    weights_of,
)

CASE = Case(B=2, T=40, S=40, H=4, D=8, is_causal=True)


@pytest.fixture
def graphs(monkeypatch):
    """Compile blocks as on CUDA with a backend that records graphs. Calls of more than 16 queries have blocks of 8."""
    made = []

    def count(graph, inputs):
        made.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    monkeypatch.setattr(blocks, "BACKEND", backend)
    monkeypatch.setattr(compiled, "attend", blocks.attend_compiled)
    monkeypatch.setattr(chunking, "WHOLE_LENGTH", 16)
    monkeypatch.setattr(chunking, "CHUNK", 8)
    monkeypatch.setattr(blocks, "_static_shapes", set())
    blocks._compiled.cache_clear()
    torch._dynamo.reset()
    yield made
    blocks._compiled.cache_clear()
    torch._dynamo.reset()


def errors(case: Case) -> float:
    expected, got = (output_and_gradients(case, impl) for impl in ("reference", "compiled"))
    return max(relative_error(got[name], expected[name]) for name in expected)


@pytest.mark.long
def test_training_run_compiles_few_graphs(graphs):
    """Run training and evaluation with a smaller last batch and with short sequences.

    The number of graphs does not depend on the number of blocks and does not grow after the first epoch.
    """
    training, last, short = CASE, replace(CASE, B=1), replace(CASE, T=13, S=13)
    counts = []
    for _ in range(2):
        for case in (training, last, short):
            assert errors(case) < 1e-12
            with torch.no_grad():
                run(case, make_operands(case), "compiled")
        counts.append(len(graphs))
    # 2 kinds of blocks per batch size, 1 for short sequences; each has forward, backward and forward without gradients
    assert counts == [3 * (2 + 2 + 1)] * 2


def test_growing_cache_compiles_one_graph(graphs):
    with torch.no_grad():
        for S in range(5, 40):
            case = Case(B=1, T=1, S=S, H=2, D=4, branches="qkg")
            operands = make_operands(case)
            assert relative_error(run(case, operands, "compiled"), run(case, operands, "reference")) < 1e-12
    assert len(graphs) == 1


@pytest.mark.slow
def test_shapes_beyond_the_limit_of_static_shapes_share_a_graph(graphs, monkeypatch):
    monkeypatch.setattr(blocks, "STATIC_SHAPES", 2)
    for T in range(3, 9):
        assert errors(replace(CASE, T=T, S=T)) < 1e-12
    assert len(graphs) <= 2 * (2 + 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        CASE,
        replace(CASE, mask="float-inf", shared=2, is_causal=False),
        replace(CASE, mask="bias 1HTS", window_size=9, compositions="post"),
        replace(CASE, has_documents=True, dropout_p=0.3, branches="qkg"),
        replace(CASE, T=50, S=41, compositions="pre"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("graphs")
def test_compiled_blocks_match_the_reference_for_all_kinds_of_calls(case):
    assert errors(case) < 1e-12


@pytest.mark.parametrize(
    "case",
    [
        CASE,
        replace(CASE, mask="bias 1HTS", has_documents=True, dropout_p=0.2, shared=2),
        replace(CASE, T=25, window_size=9, branches="qg", is_causal=False),
    ],
    ids=str,
)
def test_several_blocks_are_traced_as_one_operator(case, monkeypatch):
    monkeypatch.setattr(chunking, "WHOLE_LENGTH", 16)
    monkeypatch.setattr(chunking, "CHUNK", 8)
    operands, calls = make_operands(case), []

    def count(graph, inputs):
        calls.append([node.target for node in graph.graph.nodes if "compiled_attention" in str(node.target)])
        return make_boxed_func(graph.forward)

    seed = torch.tensor([5, 7])
    monkeypatch.setattr(compiled, "draw_seed", lambda device: seed)
    monkeypatch.setattr("dcmha.impl.reference.draw_seed", lambda device: seed)
    document_ids = make_documents(case) if case.has_documents else None
    backend = aot_autograd(fw_compiler=count, bw_compiler=count)
    function = torch.compile(lambda x: call(case, x, "compiled", document_ids), backend=backend, fullgraph=True)
    expected, got = call(case, operands, "reference", document_ids), function(operands)
    assert relative_error(got, expected) < 1e-12
    gradients = [torch.autograd.grad(y.sin().sum(), list(operands.values())) for y in (expected, got)]
    for name, right, found in zip(operands, *gradients, strict=True):
        assert relative_error(found, right) < 1e-12, name
    assert [len(found) for found in calls] == [1, 1]  # forward and backward


def test_bias_merged_with_another_operand_by_the_compiler(monkeypatch):
    """Common subexpressions become one tensor, so that q and the bias are the same object in the graph."""
    monkeypatch.setattr(chunking, "WHOLE_LENGTH", 16)
    monkeypatch.setattr(chunking, "CHUNK", 8)
    torch.manual_seed(0)
    mask, (k, v) = torch.randn(1, 2, 20, 20), torch.randn(2, 1, 2, 20, 20, requires_grad=True)
    base = torch.randn(1, 2, 2, requires_grad=True)

    def attend(mask, k, v, base):
        q = mask.masked_fill(~(mask != -torch.inf), 0.0)
        return composed_attention(q, k, v, post=ComposeWeights(base=base), attn_mask=mask, impl="compiled")

    compiled_attend = torch.compile(attend, backend="aot_eager_decomp_partition", fullgraph=True)
    expected, got = (
        torch.autograd.grad(f(mask, k, v, base).square().sum(), (k, v, base)) for f in (attend, compiled_attend)
    )
    torch.testing.assert_close(got, expected)


@pytest.mark.long
@pytest.mark.usefixtures("graphs")
def test_compiled_gradients_of_blocks_match_the_reference(monkeypatch):
    """Run the backward pass of the operator as on CUDA."""
    monkeypatch.setattr(custom_op, "attend", blocks.attend_compiled)
    monkeypatch.setattr(custom_op, "gradients", blocks.gradients_compiled)
    operands = make_operands(CASE)
    function = torch.compile(lambda x: call(CASE, x, "compiled", None), backend="aot_eager", fullgraph=True)
    expected, got = call(CASE, operands, "reference", None), function(operands)
    found = [torch.autograd.grad(y.sin().sum(), list(operands.values())) for y in (expected, got)]
    for name, right, wrong in zip(operands, *found, strict=True):
        assert relative_error(wrong, right) < 1e-12, name


def call(case: Case, operands: dict[str, torch.Tensor], impl: str, document_ids: torch.Tensor | None) -> torch.Tensor:
    """Call the operator without a random number generator, which a compiler cannot trace."""
    weights = {c: weights_of(operands, c) if c in case.compositions else None for c in ("pre", "post")}
    return composed_attention(
        *(operands[name] for name in "qkv"),
        **weights,
        attn_mask=operands.get("mask"),
        document_ids=document_ids,
        dropout_p=case.dropout_p,
        is_causal=case.is_causal,
        window_size=case.window_size,
        impl=impl,
    )
