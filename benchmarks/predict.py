"""What a training step is predicted to cost against the same model with plain attention, from counted instructions.

python benchmarks/predict.py --json benchmarks/results/predicted_steps.json
No GPU is needed, and none was used: instructions come from `results/aot_kernels.json`, bytes and products from the plan
of the chunks, rates from data sheets. A measured step can be laid beside each row. Rates are those of an H100 or H200:
a clock is one of 132 multiprocessors at 1.755 GHz, each with 128 instruction lanes.
"""

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import timm
import torch
from measure import save

import dcvision  # noqa: F401  (registers the models)
from dclm import Decoder, decoder_config
from dclm.config import CONFIGS
from dcmha.impl.triton.chunks import chunks
from dcmha.impl.triton.operands import slots_of_group

CLOCKS = 132 * 1.755e9  # a second, of all multiprocessors
LANES = 128
PRODUCTS = 600e12  # floating-point operations a second of large products in 16 bits
EFFICIENCY = 0.78  # of what bounds a kernel
MEMORY = {"H100": 14, "between, as in the design": 18, "H200": 21}  # bytes a clock and multiprocessor
BYTES = {  # of the workspace, that a kernel reads and writes an element
    "row_statistics": 2,
    "composed_weights": 4,
    "post_gradients": 4,
    "pre_gradients": 8,
    "key_gradients": 4,
}
PRODUCT_BYTES = 14  # likewise, of the seven products around them
PLAIN = {64: 0.66, 80: 0.73, 128: 0.92}  # clocks an element of fused plain attention, forward and backward, by head dim
COUNTED = Path(__file__).parent / "results/aot_kernels.json"
TOKENS = 16384  # of a language model's step
WINDOWS = {"1:1": (256, None), "3:1": (256, 256, 256, None)}


class Attention(NamedTuple):
    """The attention of a model: rows of the batch, tokens, heads, head dim, windows of its layers."""

    B: int
    T: int
    H: int
    D: int
    is_causal: bool
    windows: tuple[int | None, ...]


def visible(of: Attention, window: int | None) -> int:
    """Count the elements, visible pairs times heads, of a layer."""
    if not of.is_causal:
        return of.B * of.H * of.T * of.T
    reach = min(window or of.T, of.T)
    return of.B * of.H * (of.T * reach - reach * (reach - 1) // 2)


def computed(of: Attention, window: int | None) -> int:
    """Count the elements that products compute: whole chunks."""
    plan = chunks(of.B, of.H, of.T, of.T, 2, of.is_causal, window or 0)
    return sum(chunk.workspace_size(of.H) for chunk in plan)


def instructions(heads: int, is_causal: bool) -> dict[str, float]:
    """Look up the counted instructions an element of a head that there is, at compute capability 9.0."""
    rows = json.loads(COUNTED.read_text())["triton 3.8.0"]["90"]
    names = {4: "6 heads, bidirectional", 8: "6 heads, bidirectional", 16: "16 heads", 32: "32 heads"}
    name = names.get(slots_of_group(heads), "40 heads" if heads <= 48 else "52 heads")
    filled = heads / slots_of_group(heads)
    if slots_of_group(heads) < 16:
        filled = 16 // slots_of_group(heads) * heads / 16
    return {kernel: rows[f"{name}: {kernel}"]["instructions"] / filled for kernel in BYTES}


def composed_clocks(of: Attention, window: int | None, memory: float) -> dict[str, float]:
    """Predict the clocks of a layer's composed attention, forward and backward, at `EFFICIENCY`, by part."""
    counted = instructions(of.H, of.is_causal)
    elements, in_products = visible(of, window), computed(of, window)
    clocks = {name: elements * max(counted[name] / LANES, BYTES[name] / memory) for name in BYTES}
    operations = 14 * of.D / PRODUCTS * CLOCKS
    clocks["products"] = in_products * max(PRODUCT_BYTES / memory, operations)
    return {name: value / EFFICIENCY for name, value in clocks.items()}


def predict(
    plain_params: int, composed_params: int, tokens: int, of: Attention, num_layers: int, memory: float
) -> dict:
    """Compare a step with that of the plain model, all of whose layers see everything."""
    linear = [6 * params * tokens / PRODUCTS for params in (plain_params, composed_params)]
    plain = num_layers * visible(of, None) * PLAIN[of.D] / CLOCKS
    layers = [composed_clocks(of, of.windows[n % len(of.windows)], memory) for n in range(num_layers)]
    composed = sum(sum(layer.values()) for layer in layers) / CLOCKS
    whole = composed_clocks(of, None, memory)
    return {
        "ratio": round((linear[0] + plain) / (linear[1] + composed), 3),
        "clocks an element, by part": {name: round(c / visible(of, None), 3) for name, c in whole.items()},
        "clocks an element": round(sum(whole.values()) / visible(of, None), 2),
        "instructions an element": round(sum(instructions(of.H, of.is_causal).values()), 1),
        "seconds": {"linear layers": linear[1], "attention": composed, "plain model": linear[0] + plain},
    }


def language_models() -> list[tuple[str, int, int, int, Attention, int]]:
    """List the composed language models with their twins' parameters in products."""
    rows = []
    for name in CONFIGS:
        if not CONFIGS[name].is_composed or name.endswith("debug"):
            continue
        for pattern, windows in WINDOWS.items():
            config = decoder_config(name, windows=windows)
            plain = decoder_config(name, windows=(None,), pre_compose=False, post_compose=False)
            params = [_in_products(c) for c in (plain, config)]
            T = config.context_length
            of = Attention(TOKENS // T, T, config.num_heads, config.dim // config.num_heads, True, windows)
            rows.append((f"{name}, {pattern}", *params, TOKENS, of, config.num_layers))
    return rows


def _in_products(config) -> int:
    with torch.device("meta"):
        decoder = Decoder(config)
    return sum(p.numel() for p in decoder.parameters()) - decoder.embed.weight.numel()


def vision_models(batch_size: int = 256) -> list[tuple[str, int, int, int, Attention, int]]:
    """List the vision models with their twins' parameters."""
    rows = []
    for size in ("small", "medium", "base"):
        with torch.device("meta"):
            models = [timm.create_model(f"{kind}_{size}_patch16_224") for kind in ("mhavit", "dcvit")]
        layer, T = models[1].blocks[0].attn, models[1].patch_embed.num_patches
        of = Attention(batch_size, T, layer.num_heads, layer.head_dim, False, (None,))
        params = [sum(p.numel() for p in model.parameters()) for model in models]
        rows.append((f"dcvit_{size}_patch16_224", *params, batch_size * T, of, len(models[1].blocks)))
    return rows


def main() -> None:
    """Predict and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    for name, *row in [*language_models(), *vision_models()]:
        found = {gpu: predict(*row, memory) for gpu, memory in MEMORY.items()}
        ratios = "  ".join(f"{100 * of['ratio']:4.0f} %" for of in found.values())
        first = found["H100"]
        print(f"{name:34} {first['instructions an element']:6.1f} instructions  {ratios}")
        results.append({"model": name, "heads": row[3].H, **found})
    print("of the plain model's throughput, predicted for " + ", ".join(f"{g} ({m} B)" for g, m in MEMORY.items()))
    rates = {"products": PRODUCTS, "efficiency": EFFICIENCY, "bytes a clock": MEMORY, "plain clocks": PLAIN}
    save(options.json, {"kind": "prediction, nothing was timed", "options": {}, "rates": rates, "results": results})


if __name__ == "__main__":
    main()
