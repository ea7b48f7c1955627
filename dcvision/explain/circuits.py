"""`dcvision explain circuits`: classes that the heads' OV circuits write for images (equation 12)."""

# B images, T tokens, C model width, K classes

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice

import torch
from torch import Tensor, nn
from tqdm import tqdm

from dcmha.analysis import attention_layers, head_outputs
from dctrain.checkpointing.checkpoint import make_folder
from dctrain.errors import UserError, as_user_error
from dctrain.evaluation.run import check_at_least_one
from dctrain.explain.circuits_report import HeadWrites, RelationScore, explain_circuits, list_written, score_head
from dctrain.explain.explanation import origin_of, write_explanation

from ..attention_plots import prefix_tokens
from ..evaluation.images import readable_images
from .images import load_on

RELATION = "the image's own class"


def circuits(
    checkpoint: str,
    images: str,
    limit: int = 256,
    top: int = 5,
    out: str = "circuits",
    batch_size: int = 8,
    device: str = "cpu",
) -> None:
    """List the classes that each head's OV circuit writes for images, and the heads that write the image's own class.

    The input of a head is the mean of the tokens of its layer, without prefix tokens, i.e. uniform attention. Its
    output is multiplied by the block's layer scale, if any, and by the classifier (equation 12; without norms after the
    heads, output gate or final norm). Layers whose width differs from the classifier's are skipped. Images are sampled
    from the whole set.

    Args:
        checkpoint: A model, as in `evaluate`.
        images: An image set, as in `evaluate`.
        limit: Maximum number of images.
        top: Number of listed classes per head, and maximum rank of the image's class to count as found.
        out: Folder for heads.csv, heads.png and circuits.csv.
        batch_size: Images per batch.
        device: Device, such as cuda.

    Raises:
        UserError: If an input cannot be read, or the model has no linear classifier or no attention layers of its
            width.
    """
    asked = locals().copy()
    folder = make_folder(out)
    check_at_least_one(limit=limit, top=top, batch_size=batch_size)
    network = load_on(checkpoint, device)
    model = network.model
    layers = _layers(checkpoint, model)
    seen: dict[str, list[Tensor]] = {name: [] for name in layers}
    labels: list[int] = []
    shown = iter(tqdm(readable_images(network, images, limit), "images", total=limit, leave=False))
    with torch.inference_mode(), _watching(layers, prefix_tokens(model), seen):
        while batch := list(islice(shown, batch_size)):
            labels += [label for label, _ in batch]
            model(torch.stack([image for _, image in batch]).to(device))
            for name, tokens in seen.items():  # with windows, the mean over those of an image
                seen[name][-1] = tokens[-1].unflatten(0, (len(batch), -1)).mean(1)
    names = network.classes or [f"class {number}" for number in range(model.get_classifier().out_features)]
    scores, written = [], []
    for name, tokens in seen.items():
        reads = model.get_classifier().weight * _layer_scale(model, name)
        of_layer = _judge(name, layers[name], torch.cat(tokens), reads, labels, names, top)
        scores += of_layer[0]
        written += of_layer[1]
    write_explanation(explain_circuits(scores, written, top), folder, [origin_of(checkpoint, network.model)], asked)


def _layers(checkpoint: str, model: nn.Module) -> dict[str, nn.Module]:
    """Return the attention layers with the classifier's width."""
    classifier = model.get_classifier()
    if not isinstance(classifier, nn.Linear):
        raise UserError(f"{checkpoint} has no linear classifier.")
    with as_user_error(checkpoint, ValueError):
        found = attention_layers(model)
    fitting = {name: layer for name, layer in found.items() if layer.proj.out_features == classifier.in_features}
    if not fitting:
        raise UserError(f"{checkpoint} has no attention layer of the classifier's width, {classifier.in_features}.")
    return fitting


@contextmanager
def _watching(layers: dict[str, nn.Module], prefix: int, seen: dict[str, list[Tensor]]) -> Iterator[None]:
    """Record the mean input patch [B, C] of each layer while the context is active."""

    def keep(name: str, _module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen[name].append(args[0][:, prefix:].mean(1))

    with ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.callback(layer.register_forward_pre_hook(partial(keep, name)).remove)
        yield


def _layer_scale(model: nn.Module, name: str) -> Tensor | float:
    """Return the layer scale of a block's attention [C]; 1 if there is none."""
    block = model.get_submodule(name.rpartition(".")[0])
    scale = getattr(getattr(block, "ls1", None), "gamma", None)
    scale = getattr(block, "gamma_1", None) if scale is None else scale
    return 1.0 if scale is None else scale.detach()


@torch.inference_mode()
def _judge(
    name: str, layer: nn.Module, tokens: Tensor, reads: Tensor, labels: list[int], names: list[str], top: int
) -> tuple[list[RelationScore], list[HeadWrites]]:
    """Score the heads of a layer by the logits of the classifier `reads` [K, C] for their outputs, and list the classes
    that they write for the images of each class.
    """
    scores, written, of = [], [], torch.tensor(labels)
    present = sorted(set(labels))
    for head in range(layer.num_heads):
        logits = (head_outputs(layer, tokens, head) @ reads.mT).float().cpu()
        scores.append(score_head(name, head, RELATION, logits, of, top))
        means = torch.stack([logits[of == label].mean(0) for label in present])
        written += list_written(name, head, [names[label] for label in present], means, names.__getitem__, top)
    return scores, written
