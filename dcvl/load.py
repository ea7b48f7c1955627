"""Loading and exporting trained models: runs, checkpoints, and exported folders."""

import inspect
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from timm.models import save_for_hf
from torch import Tensor

import dclm
from dclm.data.tokenizers import BYTES, Tokenizer, open_tokenizer, tokenizer_from_spec
from dctrain.checkpointing.checkpoint import find_checkpoint, load_checkpoint
from dctrain.errors import UserError, as_user_error
from dctrain.utils.device import check_device
from dctrain.utils.files import atomic_dir, write_json
from dctrain.utils.json_fields import check_fields
from dcvision.compat_checks import normalization
from dcvision.data.decode import eval_transform
from dcvision.evaluation.networks import as_in_training
from dcvision.factory import without_weights
from dcvision.pretrained import load_pretrained

from .data.captions import TEMPLATE
from .data.samples import CaptionEncoder, black
from .factory import build_pair
from .metadata import FIELDS, REQUIRED
from .network import ImageText

FORMAT = "dcvl-1"
IMAGE, TEXT, CONFIG, JOINT = "image", "text", "config.json", "joint.safetensors"
TOWERS = ("image.", "text.")


class LoadedPair(NamedTuple):
    """A model with its preprocessing.

    Attributes:
        model: The model, in evaluation mode.
        encode: Encoder of texts, with the tokenizer.
        prepare: Preprocesses an encoded or decoded image to [3, size, size].
        metadata: Settings of `prepare` and `encode`.
    """

    model: ImageText
    encode: CaptionEncoder
    prepare: Callable[[bytes | Tensor], Tensor]
    metadata: dict

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the texts."""
        return self.encode.tokenizer


def load_pair(checkpoint: str, device: torch.device | str = "cpu") -> LoadedPair:
    """Load a model.

    Args:
        checkpoint: A .ckpt file or run of `dcvl fit`, or a folder written by `dcvl export`.
        device: Device of the model.

    Raises:
        UserError: If it cannot be loaded, or the device cannot be used.
    """
    pair = _of_folder(Path(checkpoint)) if (Path(checkpoint) / CONFIG).is_file() else _of_run(checkpoint)
    with as_user_error(f"device={str(device)!r} cannot be used"):
        pair.model.to(check_device(device))
    return pair


def is_pair(source: str) -> bool:
    """Whether `source` is a checkpoint or run of `dcvl fit`, or a folder written by `dcvl export`."""
    if (Path(source) / CONFIG).is_file():
        with as_user_error(f"{Path(source) / CONFIG} is damaged"):
            return json.loads((Path(source) / CONFIG).read_text()).get("format") == FORMAT
    if not Path(source).exists():
        return False
    return "text_model" in load_checkpoint(find_checkpoint(source)).get("hyper_parameters", {})


def export(checkpoint: str, out: str) -> None:
    """Export a model: image/ is a timm model folder, text/ a model folder of dclm; other parameters are next to them.

    Args:
        checkpoint: A .ckpt file or run of `dcvl fit`.
        out: Output folder; must not exist.
    """
    target = Path(out)
    if target.exists():
        raise UserError(f"{out} already exists; nothing was overwritten.")
    model, encode, _, metadata = load_pair(checkpoint)
    joint = {name: weight for name, weight in model.state_dict().items() if not name.startswith(TOWERS)}
    with as_user_error(f"cannot write {out}"), atomic_dir(target) as folder:
        data_config = {"input_size": (3, metadata["image_size"], metadata["image_size"])}
        save_for_hf(model.image, str(folder / IMAGE), None, data_config=data_config, safe_serialization=True)
        dclm.save_pretrained(model.text, folder / TEXT, native=True)
        if encode.tokenizer.spec != BYTES:
            (folder / TEXT / "tokenizer.json").write_text(encode.tokenizer.spec)
        save_file(joint, folder / JOINT)
        write_json(folder / CONFIG, {"format": FORMAT, **metadata})
    print(f'exported to {out}; load the towers with timm.create_model("local-dir:{out}/{IMAGE}", pretrained=True),')
    print(f'dclm.load_pretrained("{out}/{TEXT}")')


def _pair(model: ImageText, tokenizer: Tokenizer, metadata: dict) -> LoadedPair:
    size = metadata["image_size"]
    transform = partial(black, size) if metadata.get("hide_images") else eval_transform(size, metadata["crop_fraction"])
    prepare = partial(as_in_training, transform, metadata["mean"], metadata["std"])
    return LoadedPair(model.eval(), CaptionEncoder(tokenizer, metadata["context_length"]), prepare, metadata)


def _of_run(checkpoint: str) -> LoadedPair:
    path = find_checkpoint(checkpoint)
    content = load_checkpoint(path)
    hp, data = content.get("hyper_parameters", {}), content.get("CaptionDataModule", {})
    if "text_model" not in hp or "tokenizer" not in data:
        raise UserError(f"{path} is not a checkpoint of dcvl, or has no tokenizer.")
    with as_user_error(f"the weights in {path} do not match its model"):
        arguments = {name: hp[name] for name in inspect.signature(build_pair).parameters}
        pair = build_pair(**arguments | {"model_kwargs": without_weights(hp["model_kwargs"])})
        weights = {k.removeprefix("model."): v for k, v in content["state_dict"].items() if k.startswith("model.")}
        pair.load_state_dict(weights)
    settings = content.get("datamodule_hyper_parameters", {})
    metadata = {
        "image_size": hp["image_size"],
        "context_length": hp["context_length"],
        "embed_dim": pair.embed_dim,
        "contrastive": hp["contrastive"],
        "templates": list(settings.get("templates", [TEMPLATE])),
        "crop_fraction": settings.get("crop_fraction", 1.0),
        "hide_images": settings.get("hide_images", False),
        "tokenizer": BYTES if data["tokenizer"] == BYTES else "tokenizer.json",
        **{name: list(values) for name, values in normalization(pair.image).items()},
    }
    with as_user_error(f"{path} is not a checkpoint of dcvl"):
        return _pair(pair, tokenizer_from_spec(data["tokenizer"]), metadata)


def _of_folder(folder: Path) -> LoadedPair:
    with as_user_error(f"{folder / CONFIG} is damaged"):
        metadata = json.loads((folder / CONFIG).read_text())
    if not isinstance(metadata, dict) or metadata.pop("format", None) != FORMAT:
        raise UserError(f"{folder} is not a model of dcvl: {CONFIG} has a different format.")
    check_fields(folder / CONFIG, metadata, FIELDS, REQUIRED)
    image = load_pretrained(str(folder / IMAGE))
    with as_user_error(str(folder)):
        text = dclm.load_pretrained(folder / TEXT)
        model = ImageText(image, text, metadata["embed_dim"], metadata["contrastive"] or "sigmoid")
        joint = load_file(folder / JOINT)
        missing, unknown = model.load_state_dict(joint, strict=False)
    missing = [name for name in missing if not name.startswith(TOWERS)]
    if missing or unknown:
        raise UserError(f"{folder / JOINT} does not match: missing {missing}, unknown {unknown}.")
    with as_user_error(f"{folder / CONFIG} is damaged"):
        named = metadata["tokenizer"]
        return _pair(model, open_tokenizer(named if named == BYTES else str(folder / TEXT / named)), metadata)
