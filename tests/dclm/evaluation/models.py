"""Folders of small random models with tokenizers."""

import json
import sysconfig
from pathlib import Path

import torch

import dclm
from dclm.data.tokenizers import train_bpe

STDLIB = Path(sysconfig.get_path("stdlib"))
SOURCES = [STDLIB / name for name in ("abc.py", "bisect.py", "keyword.py", "this.py")]  # real text


def small_folder(folder: Path, seed: int = 0, *, context_length: int = 64, name: str = "dcformer_pp_debug") -> Path:
    """Save a decoder with clearly non-uniform logits and its tokenizer in the published format."""
    folder.mkdir(parents=True)
    tokenizer = train_bpe([path.read_text() for path in SOURCES], 400)
    torch.manual_seed(seed)
    shape = {"vocab_size": 400, "dim": 32, "num_layers": 2, "num_heads": 4, "mlp_dim": 48}
    decoder = dclm.Decoder(dclm.decoder_config(name, **shape, context_length=context_length))
    with torch.no_grad():
        for key, parameter in decoder.named_parameters():
            if parameter.dim() > 1 and "compose" not in key:
                parameter.mul_(10)
    dclm.save_pretrained(decoder, folder)
    (folder / "tokenizer.json").write_text(tokenizer.spec)
    return folder


def write_records(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def pile(path: Path) -> Path:
    """Write real texts in the format of the Pile, in two parts."""
    texts = [source.read_text()[:3000] for source in SOURCES]
    return write_records(
        path,
        [{"text": text, "meta": {"pile_set_name": f"part {number % 2}"}} for number, text in enumerate(["", *texts])],
    )


def spans(path: Path, count: int = 12) -> Path:
    return write_records(
        path, [{"prompt": f"What is {n} plus {n}?\n", "target": f"It is {n + n}."} for n in range(count)]
    )


def numbers(path: Path) -> dict:
    """Return all values of a results file, keyed by name and metric."""
    entries = json.loads(path.read_text())["results"].values()
    return {(m["name"], m["metric"]): m["value"] for entry in entries for m in entry["measures"]}
