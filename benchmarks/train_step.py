"""One training step of a model against its plain-attention twin, interleaved: time ratio, time and peak memory.

python benchmarks/train_step.py --model dcvit_small_patch16_224 --batch-size 8
python benchmarks/train_step.py --batch-size 256 --device cuda --dtype bfloat16 --compile
"""

import argparse
import statistics
from collections.abc import Callable

import timm
import torch
from measure import environment, interleaved, median_ratio, peak_mib, save

import dcvision  # noqa: F401  registers the models


def make_step(
    name: str, batch_size: int, device: str, dtype: torch.dtype, compile: bool, impl: str
) -> Callable[[], None]:
    """Make a training step: forward, cross-entropy, backward, AdamW."""
    torch.manual_seed(0)
    model = timm.create_model(name, **({"impl": impl} if name.startswith("dcvit_") else {})).to(device)
    if compile:
        model.compile()
    size = model.pretrained_cfg["input_size"][-1]
    images = torch.randn(batch_size, 3, size, size, device=device)
    labels = torch.randint(model.num_classes, (batch_size,), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            loss = torch.nn.functional.cross_entropy(model(images).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="dcvit_small_patch16_224", help="a dcvit_* model; its twin is mhavit_*")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="of autocast")
    parser.add_argument("--compile", action="store_true", help="compile both models")
    parser.add_argument("--impl", default="auto", help="of the composed attention")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", help="file for the raw result")
    options = parser.parse_args()
    names = [options.model, options.model.replace("dcvit_", "mhavit_")]
    arguments = (options.batch_size, options.device, getattr(torch, options.dtype), options.compile, options.impl)
    memory = {name: peak_mib(make_step, name, *arguments) for name in names}
    device = torch.device(options.device)
    times = interleaved({name: make_step(name, *arguments) for name in names}, options.repeats, device)
    for name in names:
        median = statistics.median(times[name])
        print(f"{name:28} {1e3 * median:9.1f} ms {options.batch_size / median:9.1f} images/s {memory[name]:8.0f} MiB")
    ratio = median_ratio(times, *names)
    summary = f"step time ratio {ratio:.3f}, throughput {100 / ratio:.1f} % of the twin's"
    print(f"{summary}, median of {options.repeats} rounds")
    result = {"environment": environment(device), "options": vars(options), "ratio": ratio}
    save(options.json, result | {"seconds": times, "peak_mib": memory})


if __name__ == "__main__":
    main()
