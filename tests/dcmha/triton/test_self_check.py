"""The self-check on first use: it accepts correct kernels, rejects wrong ones and runs once per kind of call."""

import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from dcmha import resolve_impl
from dcmha.impl import gluon, reference, self_check, triton
from dcmha.impl.triton import decode, launch
from tests.dcmha.inputs import Case, make_mask, make_operands, run

CASE = Case(B=1, T=9, S=9, H=4, D=8, is_causal=True)


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    """Run the self-check on the CPU with a smaller problem. Return the list of checked kinds."""
    kinds, find = [], self_check._finding

    def count(kind):
        kinds.append(kind)
        return find(kind)

    monkeypatch.setattr(self_check, "DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(self_check, "_finding", count)
    monkeypatch.setattr(self_check, "KEYS", 21)
    monkeypatch.setattr(triton, "QUERIES", 10)
    monkeypatch.setattr(self_check, "_seen", set())
    monkeypatch.setattr(self_check, "_findings", {})
    return kinds


@pytest.fixture
def broken(monkeypatch):
    """Make the composed weights of the kernels 2 % too large."""
    mix = launch.KernelLauncher.composed_weights

    def wrong(self, chunk, x, lse):
        mix(self, chunk, x, lse)
        x *= 1.02

    monkeypatch.setattr(launch.KernelLauncher, "composed_weights", wrong)


def call(case: Case = CASE) -> torch.Tensor:
    return run(case, make_operands(case, torch.float32), "triton", make_mask(case))


@pytest.mark.parametrize(
    "case",
    [
        CASE,
        pytest.param(replace(CASE, mask="bias 1HTS", dropout_p=0.3, compositions="post"), marks=pytest.mark.slow),
        *(
            pytest.param(case, marks=pytest.mark.long)
            for case in (
                replace(CASE, S=12, window_size=3, compositions="pre"),
                replace(CASE, T=9, S=5, is_causal=False, branches="qg", H=6),
                replace(CASE, mask="float-inf", shared=2, R=1),
                replace(CASE, mask="keys", has_documents=True, G=2, branches="kb"),
            )
        ),
    ],
    ids=str,
)
def test_every_kind_of_call_is_checked_once_and_passes(case, checked):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        first, second = call(case), call(case)
    assert len(checked) == 1 and torch.equal(first, second)
    with torch.no_grad():
        call(case)  # a kind checked with gradients is not checked again without
    assert len(checked) == 1


def test_concurrent_threads_check_once_and_preserve_the_random_state(monkeypatch, checked):
    monkeypatch.setitem(self_check.SOLVERS, "Triton", lambda call, seed, d_out: [reference.attention(call, seed)])
    kind = ("Triton", torch.device("cpu"), torch.float32, (4, 4, 1, 10, 8), None, None, None, True, False, False)
    state = torch.get_rng_state()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: self_check.check(*kind, self_check.DROPOUT, False), range(8)))
    assert len(checked) == 1 and all(found) and torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
@torch.no_grad()
def test_few_queries_are_checked_as_separate_kinds(checked):
    for case in (replace(CASE, T=1), replace(CASE, T=1), replace(CASE, T=3), replace(CASE, T=5)):
        call(case)
    assert [(kind.kernels, kind.shape[3]) for kind in checked] == [("decoding", 1), ("decoding", 3)]


@torch.no_grad()
def test_broken_decoding_kernels_are_not_used(monkeypatch):
    launch_kernel = decode._launch

    def wrong(name, mixer, chunk, num_splits, composition, arguments):
        launch_kernel(name, mixer, chunk, num_splits, composition, arguments)
        if name == "decode_outputs":
            arguments[3] *= 1.02

    monkeypatch.setattr(decode, "_launch", wrong)
    with pytest.warns(UserWarning, match="decoding kernels"), pytest.raises(ValueError, match="the self-check found"):
        call(replace(CASE, T=1))


@pytest.mark.slow
def test_self_check_preserves_the_random_state(checked):
    case = replace(CASE, dropout_p=0.4)
    operands = make_operands(case, torch.float32)
    torch.manual_seed(5)
    first = run(case, operands, "triton")
    torch.manual_seed(5)
    assert torch.equal(run(case, operands, "triton"), first) and len(checked) == 1


@pytest.mark.usefixtures("broken")
def test_broken_kernels_are_reported_and_not_used(checked):
    with (
        pytest.warns(UserWarning, match="the Triton kernels disagree with the reference on cpu: out has a relative"),
        pytest.raises(ValueError, match="the self-check found wrong results on this device: out has a relative error"),
    ):
        call()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # the warning is not repeated
        with pytest.raises(ValueError, match="the self-check found"):
            call(replace(CASE, H=2))  # another kind of call
    assert len(checked) == 1


@pytest.mark.slow
def test_wrong_gradient_is_detected(monkeypatch):
    mix = launch.KernelLauncher.pre_gradients

    def wrong(self, chunk, x, da, *rest):
        mix(self, chunk, x, da, *rest)
        da *= 1.02

    monkeypatch.setattr(launch.KernelLauncher, "pre_gradients", wrong)
    with (
        pytest.warns(UserWarning, match="the gradient of q has"),
        pytest.raises(ValueError, match="the self-check found"),
    ):
        call()


@pytest.mark.usefixtures("broken")
def test_self_check_can_be_disabled(monkeypatch, checked):
    monkeypatch.setenv(self_check.ENV_SWITCH, "0")
    call()
    assert not checked


def test_failed_launch_is_reported(monkeypatch):
    def fail(*args):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(launch.KernelLauncher, "run", fail)
    with (
        pytest.warns(UserWarning, match="RuntimeError: no kernel image"),
        pytest.raises(ValueError, match="the self-check found"),
    ):
        call()


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_traced_calls_are_checked_during_tracing(checked, dynamic):
    operands, counts = make_operands(CASE, torch.float32), []

    def backend(graph, inputs):
        counts.append(len(checked))
        return graph.forward

    compiled = torch.compile(lambda x: run(CASE, x, "triton"), backend=backend, fullgraph=True, dynamic=dynamic)
    torch.testing.assert_close(compiled(operands), call())
    assert counts == [1] and len(checked) == 1


@pytest.mark.usefixtures("broken")
def test_traced_calls_do_not_use_broken_kernels():
    compiled = torch.compile(lambda x: run(CASE, x, "triton"), backend="eager", fullgraph=True)
    with pytest.warns(UserWarning, match="disagree"), pytest.raises(Exception, match="the self-check found"):
        compiled(make_operands(CASE, torch.float32))


def test_wrong_gluon_kernels_are_replaced_by_triton_kernels(monkeypatch, checked):
    """Replace the Gluon kernels with a wrong function because Gluon has no interpreter."""

    def wrong(call, seed, d_out=None):
        return [1.02 * reference.attention(call)]

    monkeypatch.setitem(triton.ATTENTION, "Gluon", lambda call, seed: wrong(call, seed)[0])
    monkeypatch.setitem(self_check.SOLVERS, "Gluon", wrong)
    monkeypatch.setattr(triton, "_takes_gluon", lambda q: triton._is_gluon_right(q.device, q.dtype))
    operands = make_operands(CASE, torch.float32)
    with pytest.warns(UserWarning, match="the Gluon kernels disagree"):
        got = run(CASE, operands, "triton")
    assert [kind.kernels for kind in checked] == ["Gluon", "Triton"]
    torch.testing.assert_close(got, run(CASE, operands, "reference"))


def test_gluon_kernels_require_a_supported_triton_version(monkeypatch, caplog):
    for version in ("3.6.0", "3.8.1"):
        monkeypatch.setattr("triton.__version__", version)
        assert gluon.why_unavailable.__wrapped__() is None
    for version in ("3.5.1", "3.9.0"):
        monkeypatch.setattr("triton.__version__", version)
        assert f"need Triton 3.6 to 3.8, got {version}" in gluon.why_unavailable.__wrapped__()
    monkeypatch.setattr(gluon, "why_unavailable", gluon.why_unavailable.__wrapped__)
    monkeypatch.delitem(triton.ATTENTION, "Gluon", raising=False)
    for _ in range(2):
        assert not triton._is_gluon_right(torch.device("cpu"), torch.bfloat16)
    (record,) = caplog.records
    assert "older, slower kernels: the Gluon kernels need Triton 3.6 to 3.8, got 3.9.0" in record.message


def test_auto_falls_back_to_compiled_after_a_failed_self_check(monkeypatch):
    """Simulate a GPU on which the self-check failed for one dtype."""
    with torch._subclasses.FakeTensorMode():
        q = torch.empty(2, 6, 197, 64, device="cuda", dtype=torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert resolve_impl("auto", q, is_composed=True).impl == "triton"
    self_check._findings["Triton", q.device, q.dtype] = "out is wrong"
    choice = resolve_impl("auto", q, is_composed=True)
    assert choice.impl == "compiled" and "self-check found wrong results on this device: out is wrong" in choice.reason
    assert resolve_impl("auto", q.float(), is_composed=True).impl == "triton"
