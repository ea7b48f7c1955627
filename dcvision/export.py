"""Write a trained checkpoint as a timm model folder (config.json and model.safetensors)."""

from pathlib import Path

from timm.models import save_for_hf
from torch import nn

from dctrain.checkpointing.checkpoint import check_no_run, find_checkpoint, load_checkpoint
from dctrain.errors import UserError, as_user_error
from dctrain.utils.files import atomic_dir

from .factory import build_model, without_weights


def export(checkpoint: str, out: str, raw: bool = False) -> Path:
    """Write a trained model as a timm model folder.

    Args:
        checkpoint: A .ckpt file, or the folder of a run.
        out: Folder to write; must not hold an exported model already.
        raw: Export the raw weights of a run that kept an average; otherwise the average is exported.

    Returns:
        The folder.

    Raises:
        UserError: If the checkpoint cannot be read or is none of ours, or the folder is taken or cannot be written.
    """
    check_no_run(out)
    target = Path(out)
    if (target / "model.safetensors").exists():
        raise UserError(f"{target} holds an exported model already; nothing was overwritten.")
    model, size, classes = load_network(checkpoint, raw)
    data_config = {"input_size": (3, size, size)}
    names = {"label_names": classes} if classes else None
    with as_user_error(f"{out} cannot be written"), atomic_dir(target) as folder:
        save_for_hf(model, str(folder), names, data_config=data_config, safe_serialization=True)
    print(f'exported to {out}; load with timm.create_model("local-dir:{out}", pretrained=True)')
    return target


def load_network(checkpoint: str, raw: bool = False) -> tuple[nn.Module, int, list[str] | None]:
    """Build the network of a checkpoint with its weights; return it with its image size and the names of its classes.

    Raises:
        UserError: If the checkpoint cannot be read or is none of ours.
    """
    path = find_checkpoint(checkpoint)
    content = load_checkpoint(path)
    hp = content.get("hyper_parameters", {})
    if "image_size" not in hp or "state_dict" not in content or "text_model" in hp:
        raise UserError(f"{path} is no checkpoint of dcvision: it holds no image model.")
    if "model" not in hp:
        raise UserError(f"{path} does not name its model: a module was trained; build it and load the weights into it.")
    with as_user_error(f"{path} does not hold the weights of the model that it names"):
        kwargs = without_weights(hp["model_kwargs"])
        model = build_model(hp["model"], hp["num_classes"], hp["image_size"], kwargs, hp["swap"])
        averaged = hp["ema_decay"] is not None and not raw
        prefix = "ema.module." if averaged else "model."
        weights = {k.removeprefix(prefix): v for k, v in content["state_dict"].items() if k.startswith(prefix)}
        model.load_state_dict(weights)
    classes = content.get("ImageDataModule", {}).get("classes")
    if classes is not None and not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
        raise UserError(f"{path} is no checkpoint of dcvision: its classes are no list of names.")
    return model, hp["image_size"], classes
