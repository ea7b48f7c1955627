"""Loading models: runs, checkpoints, and folders of all supported formats."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from dctrain.checkpointing.checkpoint import find_checkpoint, load_checkpoint, map_checkpoint
from dctrain.errors import UserError, as_user_error
from dctrain.utils.device import check_device

from .config import DecoderConfig, build_config
from .data.tokenizers import BYTES, Tokenizer, open_tokenizer, tokenizer_from_spec
from .decoder import Decoder
from .hub import is_known, load_pretrained, read_config

ACCEPTED = "a .ckpt file, the folder of a run, or of a DCFormer, DCPythia, Pythia or Llama model"


class LoadedModel(NamedTuple):
    """A decoder in evaluation mode, or a `ScoredModel` of `load_scored`, and its tokenizer."""

    decoder: Decoder
    tokenizer: Tokenizer


def load_model(
    checkpoint: str | Path,
    tokenizer: str | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> LoadedModel:
    """Load a decoder and its tokenizer.

    Args:
        checkpoint: A `.ckpt` file or run of `dclm fit`, or a folder for `load_pretrained`.
        tokenizer: As in `open_tokenizer`; None for the tokenizer of the checkpoint or folder.
        dtype: Dtype of the parameters; None to keep it.
        device: Device of the model.

    Raises:
        UserError: If it cannot be loaded, the tokenizer has more tokens than the model, or the device cannot be used.
    """
    return _with_tokenizer(*_load(checkpoint, dtype), checkpoint, tokenizer, device)


def load_scored(
    checkpoint: str | Path,
    tokenizer: str | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> LoadedModel:
    """Like `load_model`, but also load folders of other causal models by `transformers`, for scoring only.

    Raises:
        UserError: As in `load_model`, or if `transformers` is required and not installed.
    """
    folder = Path(checkpoint)
    with as_user_error():
        is_ours = not (folder / "config.json").is_file() or is_known(folder)
    if is_ours:
        return load_model(checkpoint, tokenizer, dtype=dtype, device=device)
    try:
        from .huggingface.hf_scorer import ScoredModel
    except ModuleNotFoundError as error:
        raise UserError(f'{folder} requires transformers: pip install "dcmha[huggingface]" ({error})') from error
    return _with_tokenizer(ScoredModel(folder, dtype), partial(_tokenizer_in, folder), checkpoint, tokenizer, device)


def _with_tokenizer(
    decoder: Decoder,
    own: Callable[[], Tokenizer],
    checkpoint: str | Path,
    tokenizer: str | None,
    device: torch.device | str,
) -> LoadedModel:
    words = open_tokenizer(tokenizer) if tokenizer is not None else own()
    if words.vocab_size > decoder.config.vocab_size:
        raise UserError(
            f"the tokenizer {tokenizer or 'of ' + str(checkpoint)} has {words.vocab_size} tokens and the model "
            f"{decoder.config.vocab_size} rows: it belongs to a different model."
        )
    with as_user_error(f"device={str(device)!r} cannot be used"):
        decoder.to(check_device(device))
    return LoadedModel(decoder.eval(), words)


def load_config(checkpoint: str | Path) -> DecoderConfig:
    """Read the configuration of a decoder, without its weights; arguments and errors as in `load_model`."""
    if (Path(checkpoint) / "config.json").is_file():
        with as_user_error():
            return read_config(Path(checkpoint))
    path = find_checkpoint(str(checkpoint))
    return _config_of(map_checkpoint(path), path)


def _config_of(content: dict, path: Path) -> DecoderConfig:
    hp = content.get("hyper_parameters", {})
    if not {"model", "vocab_size", "context_length", "overrides"} <= hp.keys():
        raise UserError(f"{path} is not a checkpoint of dclm.")
    with as_user_error(f"{path} does not hold the weights of the model that it names"):
        return build_config(hp["model"], hp["vocab_size"], hp["context_length"], hp["overrides"] or {})


def load_tokenizer(checkpoint: str | Path) -> Tokenizer | None:
    """Read the tokenizer of a model, without its weights; None if there is none."""
    if (Path(checkpoint) / "config.json").is_file():
        has_one = (Path(checkpoint) / "tokenizer.json").is_file()
        return _tokenizer_in(Path(checkpoint)) if has_one else None
    path = find_checkpoint(str(checkpoint))
    data = map_checkpoint(path).get("TokenDataModule", {})
    return _tokenizer_of(data, path) if "tokenizer" in data else None


def load_decoder(checkpoint: str | Path, dtype: torch.dtype | None = None) -> Decoder:
    """Load a decoder without a tokenizer; arguments and errors as in `load_model`."""
    return _load(checkpoint, dtype)[0].eval()


def _load(checkpoint: str | Path, dtype: torch.dtype | None) -> tuple[Decoder, Callable[[], Tokenizer]]:
    """Load a decoder, and return a function that loads its tokenizer."""
    if (Path(checkpoint) / "config.json").is_file():
        with as_user_error():
            return load_pretrained(checkpoint, dtype), partial(_tokenizer_in, Path(checkpoint))
    if checkpoint and not Path(checkpoint).exists():
        raise UserError(f"no checkpoint: {checkpoint} does not exist; expected {ACCEPTED}.")
    path = find_checkpoint(str(checkpoint))
    content = load_checkpoint(path)
    config, data = _config_of(content, path), content.get("TokenDataModule", {})
    if "state_dict" not in content:
        raise UserError(f"{path} is not a checkpoint of dclm: it has no weights.")
    weights = {k.removeprefix("model."): w for k, w in content["state_dict"].items() if k.startswith("model.")}
    with as_user_error(f"{path} does not hold the weights of the model that it names"):
        decoder = Decoder(config, device="meta")  # no allocation before shapes are compared
        decoder.load_state_dict(weights, assign=True)
    return decoder.to(dtype), partial(_tokenizer_of, data, path)


def _tokenizer_of(data: dict, path: Path) -> Tokenizer:
    if "tokenizer" not in data:
        raise UserError(f"{path} has no tokenizer; set one.")
    with as_user_error(f"cannot read the tokenizer in {path}"):
        return tokenizer_from_spec(data["tokenizer"], data.get("eos"))


def _tokenizer_in(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError(
            f"no tokenizer: {path} does not exist. Set --tokenizer if it is an option ({BYTES!r}, a tokenizer.json, "
            "a hub name), or add the file."
        )
    return open_tokenizer(str(path), _end_token(folder))


def _end_token(folder: Path) -> str | None:
    """Read the end-of-text token of a folder; None if unknown."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return None
    with as_user_error(f"{path} is damaged"):
        token = json.loads(path.read_text()).get("eos_token")
        token = token["content"] if isinstance(token, dict) else token
        if token is not None and not isinstance(token, str):
            raise UserError(f"{path} is damaged: eos_token={token!r} is not a string.")
    return token
