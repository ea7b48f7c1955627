"""The check on first use: it passes what is right, finds what is wrong, remembers, and keeps out of the way."""

import json
import warnings
from dataclasses import replace

import pytest
import torch

from dcmha import functional, resolve_impl
from dcmha.choice import Choice
from dcmha.folders import cache_dir
from dcmha.impl.triton import decode, first_use, launch
from tests.dcmha.inputs import Case, make_mask, make_operands, relative_error, run

CASE = Case(B=1, T=9, S=9, H=4, D=8, is_causal=True)


@pytest.fixture(autouse=True)
def a_checked_cpu(monkeypatch, tmp_path):
    """Check on a CPU, with a cache of its own; count the checks."""
    checks, find = [], first_use._finding

    def count(call, is_few):
        checks.append(call)
        return find(call, is_few)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(first_use, "DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(first_use, "_finding", count)
    monkeypatch.setattr(first_use, "MANY", 21)
    monkeypatch.setattr(first_use, "FEW", 10)
    start_anew()
    yield checks
    start_anew()


def start_anew() -> None:
    """Forget what a process remembers."""
    first_use._seen.clear()
    first_use._findings.clear()


@pytest.fixture
def broken(monkeypatch):
    """Kernels whose composed weights are 2 % too large."""
    mix = launch.Mixer.composed_weights

    def wrong(self, chunk, x, log_sum):
        mix(self, chunk, x, log_sum)
        x *= 1.02

    monkeypatch.setattr(launch.Mixer, "composed_weights", wrong)


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
                replace(CASE, S=12, window=3, compositions="pre"),
                replace(CASE, T=9, S=5, is_causal=False, branches="qg", H=6),
                replace(CASE, mask="float-inf", shared=2, R=1),
                replace(CASE, mask="keys", has_documents=True, G=2, branches="kb"),
            )
        ),
    ],
    ids=str,
)
def test_every_kind_of_call_passes_once(case, a_checked_cpu):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        first, second = call(case), call(case)
    assert len(a_checked_cpu) == 1 and torch.equal(first, second)
    start_anew()
    call(case)  # a new process
    assert len(a_checked_cpu) == 1
    with torch.no_grad():
        call(case)  # what was checked with gradients is right without
    assert len(a_checked_cpu) == 1


@pytest.mark.slow
@torch.no_grad()
def test_few_queries_are_a_kind_of_their_own(a_checked_cpu):
    one, few = replace(CASE, T=1, compositions="pre"), replace(CASE, T=3)
    for case in (one, one, few, replace(few, T=5)):
        call(case)
    assert [checked.q.shape[2] for checked in a_checked_cpu] == [1, 3]
    compiled = torch.compile(lambda case: call(case), backend="eager")
    compiled(one), compiled(few)  # what is traced runs through the operator alone
    assert len(a_checked_cpu) == 2


@torch.no_grad()
def test_a_broken_kernel_of_few_queries_is_not_used(monkeypatch, a_checked_cpu):
    launch_kernel = decode._launch

    def wrong(name, mixer, chunk, num_splits, composition, arguments):
        launch_kernel(name, mixer, chunk, num_splits, composition, arguments)
        if name == "decode_outputs":
            arguments[3] *= 1.02

    monkeypatch.setattr(decode, "_launch", wrong)
    case = replace(CASE, T=1)
    with pytest.warns(UserWarning, match="out has a relative error"), pytest.raises(ValueError, match="a check found"):
        call(case)
    start_anew()
    operands = make_operands(case, torch.float32)
    monkeypatch.setattr(functional, "resolve_impl", lambda *args, **kwargs: Choice("triton"))  # as if it were traced
    with pytest.warns(UserWarning, match="Calls in torch.float32 take impl='compiled'"):
        got = run(case, operands, "triton")
    torch.testing.assert_close(got, run(case, operands, "compiled"))


@pytest.mark.slow
def test_random_numbers_are_left_alone():
    operands = make_operands(CASE, torch.float32)
    state = torch.random.get_rng_state()
    run(CASE, operands, "triton")
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.usefixtures("broken")
def test_a_broken_kernel_is_told_and_not_used(a_checked_cpu):
    with (
        pytest.warns(UserWarning, match="disagree with the reference on cpu: out has a relative error of"),
        pytest.raises(ValueError, match="a check found that it is wrong on this device: out has a relative error"),
    ):
        call()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # once is enough
        with pytest.raises(ValueError, match="a check found"):
            call(replace(CASE, H=2))  # of another kind
    assert len(a_checked_cpu) == 1
    (report,) = (cache_dir() / "first_use").iterdir()
    assert json.loads(report.read_text())["kind"]["environment"]["dtype"] == "torch.float32"
    start_anew()
    with pytest.warns(UserWarning, match=str(report)), pytest.raises(ValueError, match="a check found"):
        call()  # a new process
    assert len(a_checked_cpu) == 1


@pytest.mark.slow
def test_a_wrong_gradient_is_found(monkeypatch):
    mix = launch.Mixer.pre_gradients

    def wrong(self, chunk, x, da, *rest):
        mix(self, chunk, x, da, *rest)
        da *= 1.02

    monkeypatch.setattr(launch.Mixer, "pre_gradients", wrong)
    with pytest.warns(UserWarning, match="the gradient of q has"), pytest.raises(ValueError, match="a check found"):
        call()


@pytest.mark.usefixtures("broken")
def test_it_can_be_switched_off(monkeypatch, a_checked_cpu):
    monkeypatch.setenv(first_use.SWITCH, "0")
    call()
    assert not a_checked_cpu


def test_a_launch_that_fails_is_a_finding(monkeypatch):
    def fail(*args):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(launch.Mixer, "run", fail)
    with pytest.warns(UserWarning, match="RuntimeError: no kernel image"), pytest.raises(ValueError, match="a check"):
        call()


@pytest.mark.slow
def test_autograd_has_no_part_in_running_the_kernels(a_checked_cpu, monkeypatch):
    """Its thread for a GPU may be the one that waits for the check."""
    kernels = first_use._results_of_kernels

    def without_autograd(*arguments):
        with monkeypatch.context() as patch:
            patch.delattr(torch.autograd, "grad")
            return kernels(*arguments)

    monkeypatch.setattr(first_use, "_results_of_kernels", without_autograd)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        call()
    assert len(a_checked_cpu) == 1


def compiled(operands: dict[str, torch.Tensor], monkeypatch) -> torch.Tensor:
    """Call under a compiler, and see to it that nothing is checked while it traces."""

    def backend(graph, inputs):
        assert not first_use._seen and not first_use._findings.get(environment)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    environment = first_use._environment(operands["q"].device, torch.float32)
    return torch.compile(lambda x: run(CASE, x, "triton"), backend=backend, fullgraph=True)(operands)


@pytest.mark.slow
def test_what_was_traced_is_checked_when_it_first_runs(a_checked_cpu, monkeypatch):
    operands = make_operands(CASE, torch.float32)
    out = compiled(operands, monkeypatch)
    assert len(a_checked_cpu) == 1  # forward
    for _ in range(2):
        torch.autograd.grad(out.sum(), list(operands.values()), retain_graph=True)
        assert len(a_checked_cpu) == 2  # and backward


@pytest.mark.usefixtures("broken")
def test_what_was_traced_computes_by_chunks_if_the_kernels_are_wrong(monkeypatch):
    case = CASE
    operands = make_operands(case, torch.float32)
    with pytest.warns(UserWarning, match="disagree with the reference on cpu: out has"):
        got = compiled(operands, monkeypatch)
    exact = {name: x.detach().double().requires_grad_() for name, x in operands.items()}
    expected = run(case, exact, "reference")
    assert relative_error(got, expected) < 3e-6
    gradients = torch.autograd.grad(got.square().sum(), list(operands.values()))
    of_exact = torch.autograd.grad(expected.square().sum(), list(exact.values()))
    for name, a, b in zip(operands, gradients, of_exact, strict=True):
        assert relative_error(a, b) < 3e-6, name


def test_auto_takes_what_is_right(monkeypatch):
    """On a GPU, of which a check has found something."""
    with torch._subclasses.FakeTensorMode():
        q = torch.empty(2, 6, 197, 64, device="cuda", dtype=torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    assert resolve_impl("auto", q, is_composed=True).impl == "triton"
    first_use._findings[first_use._environment(q.device, q.dtype)] = "out is wrong"
    choice = resolve_impl("auto", q, is_composed=True)
    assert choice.impl == "compiled" and "a check found that it is wrong on this device: out is wrong" in choice.reason
    assert resolve_impl("auto", q.float(), is_composed=True).impl == "triton"
