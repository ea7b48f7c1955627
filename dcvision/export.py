"""Export of a trained checkpoint as a timm model folder (config.json and model.safetensors)."""

from pathlib import Path

from timm.models import save_for_hf
from torch import nn

from dctrain.checkpointing.checkpoint import check_no_run, find_checkpoint, load_checkpoint
from dctrain.errors import UserError, as_user_error
from dctrain.utils.files import atomic_dir

from .factory import build_model, without_weights


def export(checkpoint: str, out: str, raw: bool = False) -> Path:
    """Export a trained model as a timm model folder.

    Args:
        checkpoint: A .ckpt file, or the folder of a run.
        out: Output folder; must not contain an exported model.
        raw: Export the raw weights instead of the averaged weights, for runs with weight averaging.

    Returns:
        The folder.

    Raises:
        UserError: If the checkpoint cannot be read or is not from dcvision, or the folder contains a model or cannot be
            written.
    """
    check_no_run(out)
    target = Path(out)
    if (target / "model.safetensors").exists():
        raise UserError(f"{target} already contains an exported model; nothing was overwritten.")
    model, size, classes = load_network(checkpoint, raw)
    data_config = {"input_size": (3, size, size)}
    names = {"label_names": classes} if classes else None
    with as_user_error(f"cannot write {out}"), atomic_dir(target) as folder:
        save_for_hf(model, str(folder), names, data_config=data_config, safe_serialization=True)
    print(f'exported to {out}; load with timm.create_model("local-dir:{out}", pretrained=True)')
    return target


def load_network(checkpoint: str, raw: bool = False) -> tuple[nn.Module, int, list[str] | None]:
    """Build the network of a checkpoint with its weights; return it with its image size and class names.

    Raises:
        UserError: If the checkpoint cannot be read or is not from dcvision.
    """
    path = find_checkpoint(checkpoint)
    content = load_checkpoint(path)
    hp = content.get("hyper_parameters", {})
    if "image_size" not in hp or "state_dict" not in content or "text_model" in hp:
        raise UserError(f"{path} is not a checkpoint of dcvision: it has no image model.")
    if "model" not in hp:
        raise UserError(f"{path} was trained from a module: build the module and load the weights into it.")
    with as_user_error(f"the weights in {path} do not match its model"):
        kwargs = without_weights(hp["model_kwargs"])
        model = build_model(hp["model"], hp["num_classes"], hp["image_size"], kwargs, hp["swap"])
        averaged = hp["ema_decay"] is not None and not raw
        prefix = "ema.module." if averaged else "model."
        weights = {k.removeprefix(prefix): v for k, v in content["state_dict"].items() if k.startswith(prefix)}
        model.load_state_dict(weights)
    classes = content.get("ImageDataModule", {}).get("classes")
    if classes is not None and not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
        raise UserError(f"{path} is not a checkpoint of dcvision: its classes are not a list of names.")
    return model, hp["image_size"], classes
