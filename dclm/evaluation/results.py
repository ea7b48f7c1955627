"""Results: what was measured of a model, where and with what, as JSON that grows measure by measure."""

import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import torch

from dctrain.environment import environment
from dctrain.errors import UserError, told_as
from dctrain.files import write_json, written_whole

from ..decoder import Decoder
from ..load import LoadedModel
from .measures import Measure

FORMAT = "dclm-evaluation-1"


class Results:
    """What was measured of one model.

    Attributes:
        model: Its name.
        content: As the file has it: what the model is and where it ran, and under "results" for each measure its
            settings and numbers.
    """

    def __init__(self, content: dict) -> None:
        self.content, self.model = content, content["model"]

    @property
    def measures(self) -> list[Measure]:
        """All numbers."""
        return [Measure(**measure) for entry in self.content["results"].values() for measure in entry["measures"]]

    def has(self, title: str, settings: dict) -> bool:
        """Tell whether something was measured, with these settings."""
        return self.content["results"].get(title, {}).get("settings") == _as_json(settings)

    def add(self, title: str, settings: dict, measures: Sequence[Measure], num_cut: int) -> None:
        """Add what was measured; `num_cut` texts had lost their beginnings."""
        entry = {"settings": settings, "num_cut": num_cut, "measures": [measure._asdict() for measure in measures]}
        self.content["results"][title] = _as_json(entry)

    def write(self, path: Path) -> None:
        """Write the file whole."""
        write_json(path, self.content)


def describe_model(name: str, checkpoint: str, model: LoadedModel, device: torch.device) -> dict:
    """Tell what a model is and where it runs."""
    decoder, tokenizer = model
    weights = list(decoder.parameters())
    return {
        "format": FORMAT,
        "model": name,
        "checkpoint": checkpoint,
        "weights_crc32": fingerprint(decoder),
        "parameters": sum(weight.numel() for weight in weights),
        "dtype": str(weights[0].dtype).removeprefix("torch."),
        "config": _as_json(asdict(decoder.config)),
        "tokenizer": {
            "crc32": zlib.crc32(tokenizer.spec.encode()),
            "vocab_size": tokenizer.vocab_size,
            "eos_id": tokenizer.eos_id,
        },
        "environment": environment(device) | {"dcmha": version("dcmha")},
        "results": {},
    }


def fingerprint(decoder: Decoder) -> int:
    """Sum up all weights, whatever device they are on."""
    checksum = 0
    for weight in decoder.state_dict().values():
        data = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        checksum = zlib.crc32(data.numpy(), checksum)
    return checksum


IDENTITY = ("weights_crc32", "dtype", "tokenizer")


def open_results(path: Path, described: dict) -> Results:
    """Go on with a file of the same model, or begin one.

    Raises:
        UserError: If the file is of another model, or damaged.
    """
    if not path.is_file():
        return Results(described)
    found = read_results(path)
    if any(found.content[name] != described[name] for name in IDENTITY):
        raise UserError(f"{path} is of other weights, another dtype or another tokenizer; name another out.")
    return Results(described | {"results": found.content["results"]})


def read_results(path: Path) -> Results:
    """Read a file.

    Raises:
        UserError: If it is none.
    """
    if not path.is_file():
        raise UserError(f"{path} does not exist; accepted: a JSON file that `dclm evaluate` wrote.")
    with told_as(f"{path} is no JSON"):
        content = json.loads(path.read_text())
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{path} is no result of `dclm evaluate`.")
    return Results(content)


def write_csv(path: Path, models: Sequence[Results]) -> None:
    """Write a line for each number of each model."""
    with written_whole(path) as file:
        lines = [",".join(("model", "checkpoint", "commit", "torch", *Measure._fields))]
        for results in models:
            where = results.content["environment"]
            head = (results.model, results.content["checkpoint"], where["commit"], where["torch"])
            lines += [_csv_line((*head, *measure)) for measure in results.measures]
        file.write(("\n".join(lines) + "\n").encode())


def _csv_line(values: Sequence) -> str:
    quoted = (f'"{value}"' if isinstance(value, str) and set(value) & set(',"') else value for value in values)
    return ",".join("" if value is None else str(value) for value in quoted)


def _as_json(content: dict) -> dict:
    """Make of content what reading it back gives."""
    return json.loads(json.dumps(content))
