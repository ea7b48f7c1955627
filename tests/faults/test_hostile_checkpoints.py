"""Files that execute code when unpickled. Every command that reads a checkpoint or a model folder rejects them."""

import json
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest

import dcvl.cli
from dclm.language_model import LanguageModel
from dctrain.checkpointing.checkpoint import newest_checkpoint
from dcvision.classifier import ImageClassifier
from tests.dclm.commands import run as run_dclm
from tests.dclm.commands import small as small_dclm
from tests.dclm.data.corpora import numbered_corpus
from tests.dcvision.commands import run as run_dcvision
from tests.dcvision.commands import small as small_dcvision

from .fault_injection import mistake


def pickle_that_touches(path: Path, module: str, name: str) -> bytes:
    """Return a pickle that calls `module.name` on text that creates the file, in protocol 4 (allows dotted names)."""
    command = (f"open({str(path)!r}, 'w').close()" if name == "exec" else f"touch {path}").encode()
    short = [b"\x8c" + bytes([len(text)]) + text for text in (module.encode(), name.encode())]
    return b"\x80\x04" + b"".join(short) + b"\x93X" + len(command).to_bytes(4, "little") + command + b"\x85R."


CALLS = [
    ("torch.distributed.checkpoint.filesystem", "os.system"),
    pytest.param(("os", "system"), marks=pytest.mark.slow),
    pytest.param(("builtins", "exec"), marks=pytest.mark.slow),
]


def as_archive(content: bytes, path: Path) -> None:
    """Write a pickle in the archive format of `torch.save`."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{path.stem}/data.pkl", content)
        file.writestr(f"{path.stem}/version", "3\n")


@pytest.mark.parametrize("call", [("os", "system"), ("builtins", "exec")], ids=".".join)
def test_payloads_create_file_if_unpickled(tmp_path, call):
    pickle.loads(pickle_that_touches(tmp_path / "pwned", *call))
    assert (tmp_path / "pwned").exists()


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> Path:
    """Sharded checkpoint of a short dclm run."""
    root = tmp_path_factory.mktemp("sharded")
    corpus = numbered_corpus(root / "corpus", 41 * 24 + 1, 7 * 24 + 1)
    run_dclm(
        "fit", *small_dclm(corpus, root), "--trainer.max_steps=1", "--trainer.limit_val_batches=1",
        "--trainer.strategy=fsdp2",
    )  # fmt: skip
    return newest_checkpoint(root / "t")


@pytest.fixture(params=CALLS, ids=".".join)
def payload(request, tmp_path) -> bytes:
    """Pickle that creates the file `pwned`."""
    return pickle_that_touches(tmp_path / "pwned", *request.param)


def doors_of_dclm(checkpoint: Path, corpus: Path, root: Path) -> list[list[str]]:
    fit, read = ["fit", *small_dclm(corpus, root)], f"--checkpoint={checkpoint}"
    out = f"--out={root / 'out'}"
    return [
        [*fit, f"--resume={checkpoint}"],
        [*fit, f"--resume={checkpoint}", "--trainer.strategy=fsdp2"],
        [*fit, f"--init={checkpoint}"],
        ["validate", *small_dclm(corpus, root), read],
        ["test", *small_dclm(corpus, root), read],
        ["generate", read, "--prompt=a"],
        ["export", read, out],
        ["evaluate", read, f"--texts={__file__}", out],
        ["explain", "diversity", read, out],
        ["explain", "breakdown", read, "--prompt=a", out],
        ["explain", "report", read, "--prompt=a", "--target=b", out],
    ]


def doors_of_dcvision(checkpoint: Path, shards: str, image: str, root: Path) -> list[list[str]]:
    fit, read = ["fit", *small_dcvision(shards, root)], f"--checkpoint={checkpoint}"
    out = f"--out={root / 'out'}"
    return [
        [*fit, f"--resume={checkpoint}"],
        [*fit, f"--init={checkpoint}"],
        ["validate", *small_dcvision(shards, root), read],
        ["predict", *small_dcvision(shards, root), read],
        ["export", read, out],
        ["evaluate", read, f"--images=shards:{shards}", out],
        ["visualize", read, f"--image={image}", out],
        ["explain", "report", read, f"--image={image}", out],
    ]


def kinds_of(payload: bytes, sharded: Path, folder: Path) -> list[Path]:
    """Write malicious checkpoints: files in both formats of torch, and folders with one malicious file each."""
    made = [folder / name for name in ("legacy.ckpt", "archive.ckpt", "torch_index.ckpt", "meta.ckpt", "data.ckpt")]
    made[0].write_bytes(payload)
    as_archive(payload, made[1])
    for copied in made[2:]:
        shutil.copytree(sharded, copied)
    (made[2] / "index.json").unlink()
    (made[2] / ".metadata").write_bytes(payload)
    as_archive(payload, made[3] / "meta.pt")
    data, index = made[4] / "__0_0.distcp", json.loads((made[4] / "index.json").read_text())
    as_archive(payload, data)
    for tensor in index["tensors"].values():
        for block in tensor["blocks"]:
            block.update(start=0, length=data.stat().st_size)
    (made[4] / "index.json").write_text(json.dumps(index))
    return made


def test_dclm_commands_do_not_execute_code_of_checkpoint(payload, sharded, corpus, tmp_path, capsys):
    for path in kinds_of(payload, sharded, tmp_path):
        for door in doors_of_dclm(path, corpus, tmp_path / "root"):
            assert path.name in mistake(capsys, run_dclm, *door), door
            assert not (tmp_path / "pwned").exists(), door


def test_dcvision_commands_do_not_execute_code_of_checkpoint(payload, sharded, shards, tmp_path, capsys):
    image = Path(__file__)  # not an image; the checkpoint is rejected before this file is read
    for path in kinds_of(payload, sharded, tmp_path):
        for door in doors_of_dcvision(path, shards, str(image), tmp_path / "root"):
            assert path.name in mistake(capsys, run_dcvision, *door), door
            assert not (tmp_path / "pwned").exists(), door


def test_dcvl_export_does_not_execute_code_of_checkpoint(payload, sharded, tmp_path, capsys):
    for path in kinds_of(payload, sharded, tmp_path):
        door = ["export", f"--checkpoint={path}", f"--out={tmp_path / 'out'}"]
        assert path.name in mistake(capsys, lambda *args: dcvl.cli.main(list(args)), *door)
        assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("module", [LanguageModel, ImageClassifier])
def test_load_from_checkpoint_does_not_execute_code(payload, tmp_path, module):
    for name, write in (("a.ckpt", as_archive), ("b.ckpt", lambda content, path: path.write_bytes(content))):
        write(payload, tmp_path / name)
        with pytest.raises(Exception):  # noqa: B017 - Lightning and torch choose the type
            module.load_from_checkpoint(tmp_path / name)
        assert not (tmp_path / "pwned").exists()


def test_loading_model_folder_does_not_execute_code_of_weights(payload, tmp_path, capsys):
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"model_type": "gpt_neox", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 257, "intermediate_size": 64}))
    as_archive(payload, folder / "pytorch_model.bin")
    mistake(capsys, run_dclm, "generate", f"--checkpoint={folder}", "--prompt=a", "--tokenizer=bytes")
    (folder / "config.json").write_text(json.dumps({"architecture": "dcvit_digits_patch2_8", "num_classes": 10}))
    mistake(capsys, run_dcvision, "evaluate", f"--checkpoint={folder}", "--images=digits", f"--out={tmp_path / 'out'}")
    assert not (tmp_path / "pwned").exists()
