"""Published DCFormer and DCPythia checkpoints: read and write the official hub format.

A folder holds `config.json` and the weights as `model.safetensors` or `pytorch_model.bin`, whole or in shards with
an index. `dclm/README.md` has the table of names.
"""

import json
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from torch import Tensor

from .config import DecoderConfig
from .decoder import Decoder
from .hub_config import config_from_hub, config_to_hub
from .hub_weights import weights_from_hub, weights_to_hub

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")


def load_pretrained(folder: str | Path, dtype: torch.dtype | None = None) -> Decoder:
    """Load a published model.

    Args:
        folder: Folder in the official hub format.
        dtype: Of the parameters; None keeps that of the files.

    Returns:
        The decoder, on the CPU, in evaluation mode.

    Raises:
        ValueError: If the model type is unknown, a field of `config.json` is unknown or asks for what this format does
            not define, or tensors are missing, extra or of another shape (they are listed).
        FileNotFoundError: If `config.json` or the weights are not there.
    """
    folder = Path(folder)
    config = read_config(folder)
    weights = weights_from_hub(_read_weights(folder), config)
    decoder = Decoder(config, device="meta")
    _check_weights(folder, weights, decoder.state_dict())
    decoder.load_state_dict({k: w if dtype is None else w.to(dtype) for k, w in weights.items()}, assign=True)
    return decoder.eval()


def save_pretrained(decoder: Decoder, folder: str | Path) -> Path:
    """Write a decoder in the official hub format, derived tensors included.

    Args:
        decoder: A model that the format can express: composed by query and key (or query alone) with rank and groups
            as published, all or every second layer windowed, and so on.
        folder: Where to write; must not hold a model already.

    Returns:
        The folder.

    Raises:
        ValueError: If the format cannot express the model; the message names the field.
        FileExistsError: If there is a model in the folder.
    """
    folder = Path(folder)
    taken = [name for name in ("config.json", *WEIGHT_FILES) if (folder / name).exists()]
    if taken:
        raise FileExistsError(f"{folder} holds {taken[0]} already; nothing was overwritten.")
    dtype = decoder.output.weight.dtype
    content = config_to_hub(decoder.config, dtype)
    weights = weights_to_hub(decoder.state_dict(), decoder.config)
    folder.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(weights, folder)
    (folder / "config.json").write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    return folder


def read_config(folder: Path) -> DecoderConfig:
    """Read `config.json` as a `DecoderConfig`; raises as `load_pretrained` does."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; accepted: a folder with config.json and weights.")
    try:
        return config_from_hub(json.loads(path.read_text()))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """Read all tensors, by memory map where the format allows, and never unpickle anything but tensors."""
    for name in WEIGHT_FILES:
        index = folder / f"{name}.index.json"
        if index.is_file():
            shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        elif (folder / name).is_file():
            shards = [name]
        else:
            continue
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        if missing:
            raise FileNotFoundError(f"{folder} lacks the shards {missing} that {index.name} names.")
        return {key: tensor for shard in shards for key, tensor in _read_shard(folder / shard).items()}
    raise FileNotFoundError(f"{folder} holds no weights; accepted: {', '.join(WEIGHT_FILES)}, or shards with an index.")


def _read_shard(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise ValueError(f"{path} is no readable file of tensors ({type(error).__name__}: {error}).") from error


def _check_weights(folder: Path, weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Refuse weights that do not fit, with the whole list."""
    problems = [f"missing {name}" for name in expected if name not in weights]
    problems += [f"extra {name}" for name in weights if name not in expected]
    problems += [
        f"{name} is {list(weights[name].shape)}, not {list(expected[name].shape)}"
        for name in expected
        if name in weights and weights[name].shape != expected[name].shape
    ]
    if problems:
        raise ValueError(f"the weights in {folder} do not fit its config.json: {'; '.join(problems)}.")
