"""Time, ratio and peak memory of one training step of a composed model and its MHA baseline, interleaved.

python benchmarks/train_step.py --model dcvit_small_patch16_224 --batch-size 8
python benchmarks/train_step.py --batch-size 256 --device cuda --dtype bfloat16 --compile
"""

import argparse
from collections.abc import Callable
from itertools import product
from typing import get_args

import timm
import torch
from measure import measure, save, show, training_step

import dcvision  # noqa: F401  registers the models
from dctrain.activation_checkpointing import Recompute, set_recompute
from dctrain.utils.environment import environment


def make_step(
    name: str, batch_size: int, device: str, dtype: torch.dtype, compile: bool, impl: str, recompute: Recompute
) -> Callable[[], None]:
    """Create a training step: forward, cross-entropy, backward, AdamW."""
    torch.manual_seed(0)
    model = timm.create_model(name, **({"impl": impl} if name.startswith("dcvit_") else {})).to(device)
    set_recompute(model, recompute)
    if compile:
        model.compile()
    size = model.pretrained_cfg["input_size"][-1]
    images = torch.randn(batch_size, 3, size, size, device=device)
    labels = torch.randint(model.num_classes, (batch_size,), device=device)
    return training_step(model, lambda: torch.nn.functional.cross_entropy(model(images).float(), labels), device, dtype)


def main() -> None:
    """Run the benchmark and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="dcvit_small_patch16_224", help="a dcvit_* model; its baseline is mhavit_*")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="autocast dtype")
    parser.add_argument("--compile", action="store_true", help="compile both models")
    parser.add_argument("--impls", nargs="+", default=["auto"], help="implementations of composed attention")
    parser.add_argument(
        "--recompute",
        nargs="+",
        choices=get_args(Recompute),
        default=["none"],
        help="recomputation in backward of the composed model",
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", help="file for the raw results")
    options = parser.parse_args()
    baseline = options.model.replace("dcvit_", "mhavit_")
    arguments = (options.batch_size, options.device, getattr(torch, options.dtype), options.compile)
    makers = {}
    for impl, recompute in product(options.impls, options.recompute):
        message = f"{options.model}, {impl}" + ("" if recompute == "none" else f", {recompute}")
        makers[message] = (make_step, options.model, *arguments, impl, recompute)
    makers[baseline] = (make_step, baseline, *arguments, "auto", "none")
    device = torch.device(options.device)
    results = measure(makers, options.repeats, device)
    ratios = {}
    for name, result in results.items():
        ratios[name] = result.ratio(results[baseline])
        median, ratio = result.median, ratios[name]
        print(
            f"{name:42} {show(median and 1e3 * median, '9.1f', ' ms')}"
            f" {show(median and options.batch_size / median, '9.1f', ' images/s')}"
            f" {show(result.peak_mib, '8.0f', ' MiB')}"
            f" {show(ratio and 100 / ratio, '6.1f', ' % of the baseline')}"
        )
    print(f"medians of {options.repeats} rounds")
    record = {"environment": environment(device), "options": vars(options), "time_ratios": ratios}
    seconds = {name: result.seconds for name, result in results.items()}
    save(options.json, record | {"seconds": seconds, "peak_mib": {n: r.peak_mib for n, r in results.items()}})


if __name__ == "__main__":
    main()
