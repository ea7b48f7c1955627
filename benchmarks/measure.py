"""Utilities shared by the benchmarks: interleaved timing, peak memory, peak rates of the device, and result files."""

import gc
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

Step = Callable[[], None]


@dataclass
class Measurement:
    """Measurement of one step; `seconds` is empty if it ran out of memory.

    Attributes:
        peak_mib: Peak memory of the step in MiB, minus the memory in use before it, or None if not measured.
        seconds: Time of each round.
    """

    peak_mib: float | None
    seconds: list[float]

    @property
    def median(self) -> float | None:
        """Median of `seconds`."""
        return statistics.median(self.seconds) if self.seconds else None

    def ratio(self, base: "Measurement") -> float | None:
        """Median over rounds of the time relative to that of `base` in the same round."""
        if not self.seconds or not base.seconds:
            return None
        return statistics.median(a / b for a, b in zip(self.seconds, base.seconds, strict=True))


def training_step(
    model: torch.nn.Module, compute_loss: Callable[[], torch.Tensor], device: str, dtype: torch.dtype
) -> Step:
    """Create a training step: loss under autocast, backward, AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            loss = compute_loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(makers: dict[str, tuple], repeats: int, device: torch.device) -> dict[str, Measurement]:
    """Time steps alternately, so that noise of the machine affects all of them equally.

    Args:
        makers: For each step, a function that creates it, and the arguments of the function.
        repeats: Number of rounds.
        device: Device of the steps. A step that runs out of GPU memory has no times.
    """
    steps, results = {}, {}
    for name, (make, *args) in makers.items():
        try:
            if device.type != "cuda":
                results[name] = Measurement(_peak_of_a_process(make, *args), [])
            step = make(*args)
            step()
            if device.type == "cuda":
                results[name] = Measurement(_peak_on_cuda(step), [])
            step()
            steps[name] = step
        except torch.cuda.OutOfMemoryError:
            results[name] = Measurement(None, [])
            torch.cuda.empty_cache()
    for _ in range(repeats):
        for name, step in steps.items():
            _synchronize(device)
            start = time.perf_counter()
            step()
            _synchronize(device)
            results[name].seconds.append(time.perf_counter() - start)
    return results


def measure_singly(makers: dict[str, tuple], rounds: int, calls: int, device: torch.device) -> dict[str, Measurement]:
    """Time steps that do not fit in memory together: every round creates, warms up and calls one step after another.

    Args:
        makers: For each step, a function that creates it, and the arguments of the function.
        rounds: Number of rounds; the result is the median time of each round.
        calls: Number of calls per step and round.
        device: Device of the steps. A step that runs out of GPU memory has no times. Memory is not measured in
            distributed runs on CPU.
    """
    results = {name: Measurement(None, []) for name in makers}
    if device.type != "cuda" and not dist.is_initialized():
        for name, maker in makers.items():
            results[name].peak_mib = _peak_of_a_process(*maker)
    for _ in range(rounds):
        for name, (make, *args) in makers.items():
            try:
                _time_and_drop(make(*args), calls, device, results[name])
            except torch.cuda.OutOfMemoryError:
                results[name] = Measurement(None, [])
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return results


def _time_and_drop(step: Step, calls: int, device: torch.device, result: Measurement) -> None:
    """Add the median seconds of `calls` calls to `result`, after two warm-up calls."""
    step()
    if device.type == "cuda":
        result.peak_mib = _peak_on_cuda(step)
    step()
    seconds = []
    for _ in range(calls):
        _synchronize(device)
        start = time.perf_counter()
        step()
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
    result.seconds.append(statistics.median(seconds))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak_on_cuda(step: Step) -> float:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _peak_of_a_process(make: Callable[..., Step], *args) -> float:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak_on_cpu, (make, *args))


def _peak_on_cpu(make: Callable[..., Step], *args) -> float:
    """Return the peak memory of a step in MiB; runs in a separate process, so that steps do not reuse freed memory."""
    step = make(*args)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak memory, VmHWM
    before = _memory_mib("VmRSS")
    step()
    step()
    return _memory_mib("VmHWM") - before


def _memory_mib(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


def ceilings(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Measure the peak rates of a device: bytes/s of a large copy, FLOP/s of a large product of random matrices."""
    size, count = (2**31, 8192) if device.type == "cuda" else (2**28, 1024)
    source = torch.empty(size // 4, device=device).normal_()
    target = torch.empty_like(source)
    a, b = (torch.randn(count, count, device=device).to(dtype) for _ in range(2))
    times = {}
    for name, step in {"copy": lambda: target.copy_(source), "product": lambda: a @ b}.items():
        seconds = []
        for _ in range(8):
            _synchronize(device)
            start = time.perf_counter()
            step()
            _synchronize(device)
            seconds.append(time.perf_counter() - start)
        times[name] = statistics.median(seconds)
    return {"bytes_per_second": 2 * size / times["copy"], "flop_per_second": 2 * count**3 / times["product"]}


def show(value: float | None, form: str, unit: str) -> str:
    """Format a number, or a placeholder for None."""
    width = len(format(1.0, form))
    return f"{'-' * 3:>{width}}{unit}" if value is None else f"{value:{form}}{unit}"


def save(path: str | None, result: dict) -> None:
    """Write a result to a JSON file if `path` is given."""
    if path is not None:
        options = {key: value for key, value in result["options"].items() if key != "json"}
        Path(path).write_text(json.dumps(result | {"options": options}, indent=1) + "\n")
