"""Model folders: DCFormer, DCPythia and the native format (read and written), GPT-NeoX and Llama (read).

A folder has `config.json` and the weights as `model.safetensors` or `pytorch_model.bin`, in one file or in shards with
an index. `docs/checkpoints.md` has the table of names.
"""

import json
import zipfile
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from torch import Tensor

from dcmha.checks import check_factory, check_module
from dctrain.utils.files import atomic_dir

from ..config import DecoderConfig
from ..decoder import Decoder
from . import neox_llama
from .native import NATIVE_TYPE, config_from_native, config_to_native
from .published_config import config_from_hub, config_to_hub
from .published_weights import COMPOSE, DERIVED, compare_derived, join_qkv, weights_from_hub, weights_to_hub

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
Tensors = dict[str, Tensor]


class Format(NamedTuple):
    """Reader of one folder format.

    Attributes:
        read_config: Converts the content of `config.json`.
        prepare: Converts alternative tensor names in place.
        expected: Converts a decoder's state dict to the tensors of the folder.
        may_miss: Suffixes of optional tensors.
        read_weights: Converts the tensors to a decoder's state dict.
    """

    read_config: Callable[[dict], DecoderConfig]
    prepare: Callable[[Tensors, DecoderConfig, dict], None]
    expected: Callable[[Tensors, DecoderConfig], Tensors]
    may_miss: Callable[[DecoderConfig], tuple[str, ...]]
    read_weights: Callable[[Tensors, DecoderConfig], Tensors]


def _published_weights(tensors: Tensors, config: DecoderConfig) -> Tensors:
    compare_derived(tensors, config)
    return weights_from_hub(tensors, config)


PUBLISHED = Format(
    config_from_hub,
    lambda tensors, config, content: join_qkv(tensors),
    weights_to_hub,
    lambda config: DERIVED if config.is_composed else (*DERIVED, *COMPOSE),
    _published_weights,
)
NEOX = Format(
    neox_llama.neox_config,
    neox_llama.prepare,
    neox_llama.weights_to_huggingface,
    lambda config: (),
    neox_llama.weights_from_huggingface,
)
LLAMA = NEOX._replace(read_config=neox_llama.llama_config)
NATIVE = Format(
    config_from_native,
    lambda tensors, config, content: None,
    lambda tensors, config: tensors,
    lambda config: (),
    lambda tensors, config: tensors,
)
FORMATS = {
    **{NATIVE_TYPE: NATIVE, "dcformer": PUBLISHED, "dcpythia": PUBLISHED},
    **{"gpt_neox": NEOX, "llama": LLAMA, "mistral": LLAMA},
}


def is_known(folder: Path) -> bool:
    """Whether the model type of a folder's `config.json` is supported."""
    return _read_object(folder / "config.json").get("model_type") in FORMATS


def load_pretrained(folder: str | Path, dtype: torch.dtype | None = None) -> Decoder:
    """Load a model from a folder.

    Args:
        folder: Folder with weights and a `config.json` of model type "dcformer" or "dcpythia" (published, or written by
            `save_pretrained`), "dclm" (written by it), "gpt_neox" (Pythia), "llama" or "mistral" (Hugging Face).
        dtype: Dtype of the parameters; None for the dtype of the files (the widest, if there are several).

    Returns:
        The decoder, on the CPU, in evaluation mode.

    Raises:
        ValueError: If the model type is unknown, a field of `config.json` is unknown or not supported, or tensors are
            missing, unexpected or of the wrong shape (all are listed).
        FileNotFoundError: If `config.json` or the weights are missing.
    """
    check_factory(None, dtype)
    folder = Path(folder)
    layout, config, content = _read_config(folder)
    tensors = _read_weights(folder)
    decoder = Decoder(config, device="meta")
    expected = layout.expected(decoder.state_dict(), config)
    layout.prepare(tensors, config, content)
    _check_weights(folder, tensors, expected, layout.may_miss(config))
    weights = layout.read_weights(tensors, config)
    dtype = dtype or reduce(torch.promote_types, {w.dtype for w in weights.values()})
    decoder.load_state_dict({name: w.to(dtype) for name, w in weights.items()}, assign=True)
    return decoder.eval()


def save_pretrained(decoder: Decoder, folder: str | Path, *, native: bool = False) -> Path:
    """Write a decoder in the published format, including derived tensors, or in the native format.

    Args:
        decoder: A model supported by the format: the published one supports composition by query and key (or only
            query) with the published rank and groups, windows in all or every second layer, and so on; the native one
            all.
        folder: Output folder; must not contain a model.
        native: Whether to use the native format: the fields of `DecoderConfig`, and the state dict.

    Returns:
        The folder.

    Raises:
        TypeError: If `decoder` is not a `Decoder`.
        ValueError: If the published format does not support the model; the message names the field.
        FileExistsError: If the folder contains a model.
    """
    check_module(Decoder, decoder=decoder)
    if not str(folder):
        raise ValueError("folder='': expected a folder.")
    if decoder.device.type == "meta":
        raise ValueError("the decoder has no weights: it is on the meta device.")
    folder = Path(folder)
    patterns = ("config.json", "model*.safetensors", "pytorch_model*.bin", "*.index.json")
    taken = sorted(path.name for pattern in patterns for path in folder.glob(pattern))
    if taken:
        raise FileExistsError(f"{folder} already contains {taken[0]}; nothing was overwritten.")
    dtype = str(decoder.output.weight.dtype).removeprefix("torch.")
    config, weights = decoder.config, decoder.state_dict()
    content = (config_to_native(config) if native else config_to_hub(config)) | {"torch_dtype": dtype}
    if not native:
        weights = weights_to_hub(weights, config)
    with atomic_dir(folder) as partial:
        save_torch_state_dict(weights, partial)
        (partial / "config.json").write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    return folder


def read_config(folder: Path) -> DecoderConfig:
    """Read the configuration of a folder; errors as in `load_pretrained`."""
    return _read_config(folder)[1]


def _read_config(folder: Path) -> tuple[Format, DecoderConfig, dict]:
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; expected a folder with config.json and weights.")
    content = _read_object(path)
    kind = content.get("model_type")
    try:
        if not isinstance(kind, str) or kind not in FORMATS:
            raise ValueError(f"model_type={kind!r} is unknown; expected {', '.join(map(repr, FORMATS))}.")
        return FORMATS[kind], FORMATS[kind].read_config(content), content
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _read_object(path: Path) -> dict:
    """Read a JSON object."""
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object.")
    return content


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """Read all tensors, memory-mapped if possible; only tensors are unpickled."""
    for name in WEIGHT_FILES:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():  # takes precedence over an outdated index
            shards = [name]
        elif index.is_file():
            weight_map = _read_object(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise ValueError(f"{index} has no weight_map.")
            if not all(isinstance(shard, str) for shard in weight_map.values()):
                raise ValueError(f"{index} has an invalid weight_map.")
            shards = sorted(set(weight_map.values()))
        else:
            continue
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        if missing:
            raise FileNotFoundError(f"{folder} lacks the shards {missing} of {index.name}.")
        return {key: tensor for shard in shards for key, tensor in _read_shard(folder / shard).items()}
    raise FileNotFoundError(f"{folder} has no weights; expected {', '.join(WEIGHT_FILES)}, or shards with an index.")


def _read_shard(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:
        raise ValueError(f"{path} cannot be read as tensors ({type(error).__name__}: {error}).") from error
    if not isinstance(content, dict) or not all(isinstance(tensor, Tensor) for tensor in content.values()):
        raise ValueError(f"{path} has content other than named tensors.")
    return content


def _check_weights(folder: Path, given: dict[str, Tensor], expected: dict[str, Tensor], may_miss: tuple) -> None:
    """Raise ValueError with all tensors that do not match."""
    problems = [f"missing {name}" for name in expected if name not in given and not name.endswith(may_miss)]
    problems += [f"unknown {name}" for name in given if name not in expected and not name.endswith(may_miss)]
    for name in sorted(expected.keys() & given.keys()):
        if given[name].shape != expected[name].shape:
            problems.append(f"{name} is {list(given[name].shape)}, not {list(expected[name].shape)}")
        if not given[name].is_floating_point():
            problems.append(f"{name} is {given[name].dtype}, not floating")
    if problems:
        raise ValueError(f"the weights in {folder} do not match its config.json: {'; '.join(problems)}.")
