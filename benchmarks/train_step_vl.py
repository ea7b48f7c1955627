"""Time and peak memory of one training step of two composed towers and their MHA baseline, interleaved.

python benchmarks/train_step_vl.py --overrides '{"num_layers": 4, "dim": 512, "num_heads": 8, "mlp_dim": 1408}'
python benchmarks/train_step_vl.py --batch-size 256 --device cuda --dtype bfloat16 --compile
"""

import argparse
import json
from collections.abc import Callable

import torch
from measure import measure, save, show, training_step

from dctrain.utils.environment import environment
from dcvl import VisionLanguageModel
from dcvl.contrastive import ContrastiveBatch, contrastive_loss
from dcvl.network import Texts

PLAIN = {"pre_compose": False, "post_compose": False}


def make_step(options: argparse.Namespace, is_composed: bool) -> Callable[[], None]:
    """Create a training step: contrastive and caption loss, backward, AdamW."""
    torch.manual_seed(0)
    image = options.image if is_composed else options.image.replace("dcvit_", "mhavit_")
    module = VisionLanguageModel(
        image,
        options.image_size,
        json.loads(options.image_kwargs),
        text_model=options.text,
        text_overrides=json.loads(options.overrides) | ({} if is_composed else PLAIN),
        vocab_size=options.vocab_size,
        context_length=options.tokens,
        cross_compose=is_composed,
    )
    model = module.model.to(options.device)
    if options.compile:
        model.compile()
    size, rows = options.image_size, options.batch_size
    images = torch.randn(rows, 3, size, size, device=options.device)
    ids = torch.randint(options.vocab_size, (rows, options.tokens), device=options.device)
    owners = torch.arange(rows, device=options.device)
    texts = Texts(ids, ids.roll(-1, 1), torch.full_like(owners, options.tokens - 1), owners)

    def compute_loss() -> torch.Tensor:
        outputs = model(images, texts)
        pairs = ContrastiveBatch(outputs.images, outputs.texts, ids, torch.ones_like(owners, dtype=torch.bool))
        return contrastive_loss("sigmoid", pairs, outputs.scale, outputs.bias) + outputs.caption_loss / ids.numel()

    return training_step(model, compute_loss, options.device, getattr(torch, options.dtype))


def main() -> None:
    """Run the benchmark and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", default="dcvit_small_patch16_224", help="a dcvit_* model; its baseline is mhavit_*")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--image-kwargs", default="{}", help="additional arguments of the image tower, as JSON")
    parser.add_argument("--text", default="dcformer_pp_405m", help="name of a composed decoder configuration")
    parser.add_argument("--overrides", default="{}", help="DecoderConfig fields to replace, as JSON")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=64, help="tokens per text")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="autocast dtype")
    parser.add_argument("--compile", action="store_true", help="compile both models")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", help="file for the raw results")
    options = parser.parse_args()
    device = torch.device(options.device)
    results = measure(
        {"composed": (make_step, options, True), "plain": (make_step, options, False)}, options.repeats, device
    )
    ratio = results["composed"].ratio(results["plain"])
    for name, result in results.items():
        print(
            f"{name:10} {show(result.median and 1e3 * result.median, '9.1f', ' ms')}"
            f" {show(result.peak_mib, '8.0f', ' MiB')}"
        )
    print(f"{show(ratio, '.3f', ' x the time of the plain one')}, medians of {options.repeats} rounds")
    record = {"environment": environment(device), "options": vars(options), "time_ratio": ratio}
    seconds = {name: result.seconds for name, result in results.items()}
    save(options.json, record | {"seconds": seconds, "peak_mib": {n: r.peak_mib for n, r in results.items()}})


if __name__ == "__main__":
    main()
