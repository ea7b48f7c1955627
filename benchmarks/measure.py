"""What the benchmarks share: interleaved timing, peak memory, and a record of where a number comes from."""

import json
import multiprocessing
import platform
import resource
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch


def environment(device: torch.device) -> dict:
    """Describe the machine and versions of a measurement."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    is_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else _cpu_name(),
        "threads": None if is_cuda else torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit,
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


def interleaved(steps: dict[str, Callable[[], None]], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """Time each step in turn, over and over, so that a noisy machine disturbs all alike; returns seconds."""
    for step in steps.values():
        step()
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            _synchronize(device)
            start = time.perf_counter()
            step()
            _synchronize(device)
            times[name].append(time.perf_counter() - start)
    return times


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_ratio(times: dict[str, list[float]], name: str, base: str) -> float:
    """Return the median, over rounds, of one step's time relative to the base step of the same round."""
    return statistics.median(a / b for a, b in zip(times[name], times[base], strict=True))


def peak_mib(make_step: Callable[..., Callable[[], None]], *args) -> float:
    """Measure what two steps add to the memory in use when the step has been made, in MiB, in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak_mib, (make_step, *args))


def _peak_mib(make_step: Callable[..., Callable[[], None]], *args) -> float:
    step = make_step(*args)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        step()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    before = _resident_mib()
    step()
    step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def save(path: str | None, result: dict) -> None:
    """Write a result with everything measured to a JSON file, if one is asked for."""
    if path is not None:
        options = {key: value for key, value in result["options"].items() if key != "json"}
        Path(path).write_text(json.dumps(result | {"options": options}, indent=1) + "\n")
