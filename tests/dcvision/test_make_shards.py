"""Shards from image folders and the validation tar: contents, reproducibility, interruption and errors."""

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from dcvision.cli import main
from dcvision.data.decode import decode
from dcvision.data.shards import ShardSource, expand_urls
from tests.conftest import encode
from tests.dctrain.commands import ROOT
from tests.faults.fault_injection import mistake

from .commands import run

CLASSES = ["n01", "n02", "n03"]


@pytest.fixture
def make(capsys):
    """Function that runs `dcvision shards` in this process and returns its output or checks its error."""

    def run(*args, fails: str | None = None) -> str:
        arguments = ["shards", *map(str, args)]
        if fails is None:
            main(arguments)
            return capsys.readouterr().out
        with pytest.raises(SystemExit) as exit_info:
            main(arguments)
        error = capsys.readouterr().err
        assert exit_info.value.code == 2 and fails in error and error.startswith("error: "), error
        return error

    return run


@pytest.fixture
def folder(tmp_path) -> Path:
    root = tmp_path / "images"
    for label, name in enumerate(CLASSES):
        (root / name).mkdir(parents=True)
        for i in range(5):
            pixels = np.full((8, 8, 3), 10 * label + i, dtype=np.uint8)
            (root / name / f"{name}.v1_{i}.PNG").write_bytes(encode(pixels))
    return root


def contents(out: Path, prefix: str) -> list[tuple[int, int]]:
    """Return (pixel value, label) of every sample."""
    paths = [url for url in expand_urls(str(out)) if Path(url).name.startswith(prefix)]
    source = ShardSource(paths)
    return [(int(decode(image)[0, 0, 0]), label) for image, label in map(source.read, range(len(source)))]


def test_folder_is_converted_to_reproducible_shards(folder, tmp_path, make):
    out = tmp_path / "out"
    options = ("--folder", folder, "--out", out, "--num_shards", 4, "--num_workers", 2)
    assert "15 images of 3 classes in 4 shards" in make(*options)
    got = contents(out, "train")
    assert sorted(got) == [(10 * label + i, label) for label in range(3) for i in range(5)]
    assert got != sorted(got)
    manifest = json.loads((out / "train-manifest.json").read_text())
    assert manifest["samples"] == 15 and [s["samples"] for s in manifest["shards"]] == [4, 4, 4, 3]
    assert (out / "train-classes.txt").read_text().split() == CLASSES
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in out.glob("*.tar")}
    make(*options)
    assert before == {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in out.glob("*.tar")}
    (out / "train-0002.tar").unlink()
    (out / "train-0002.partial").write_bytes(b"half")
    make(*options)
    assert {path: content for path, (content, _) in before.items()} == {p: p.read_bytes() for p in out.glob("*.tar")}
    assert json.loads((out / "train-manifest.json").read_text()) == manifest
    make(*options[:-4], "--num_shards", 3, fails="was prepared with different num_shards; nothing was overwritten")
    assert len(list(out.glob("*.tar"))) == 4


def ground_truths(tmp_path: Path, truth: list[str]) -> dict[str, list]:
    wnids = tmp_path / "wnids.txt"
    wnids.write_text("\n".join(truth))
    table = tmp_path / "LOC_val_solution.csv"
    rows = [f"ILSVRC2012_val_{i:08d},{name} 1 2 3 4" for i, name in reversed(list(enumerate(truth)))]
    table.write_text("\n".join(["ImageId,PredictionString", *rows]))
    ids = {"n01": 3, "n02": 1, "n03": 2}
    numbers = tmp_path / "ground_truth.txt"
    numbers.write_text("\n".join(str(ids[name]) for name in truth))
    dtype = [("ILSVRC2012_ID", object), ("WNID", object)]
    savemat(tmp_path / "meta.mat", {"synsets": np.array([(i, name) for name, i in ids.items()], dtype=dtype)})
    return {
        "wnids": ["--labels", wnids],
        "csv": ["--labels", table],
        "devkit": ["--labels", numbers, "--devkit_meta", tmp_path / "meta.mat"],
    }


@pytest.mark.parametrize("form", ["wnids", "csv", "devkit"])
def test_validation_tar_is_labeled_from_every_ground_truth_format(tmp_path, form, make):
    truth = ["n02", "n01", "n03", "n02"]
    with tarfile.open(tmp_path / "val.tar", "w") as tar:
        for i in (2, 0, 3, 1):
            content = encode(np.full((8, 8, 3), i, dtype=np.uint8), "PNG")
            info = tarfile.TarInfo(f"ILSVRC2012_val_{i:08d}.png")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    (tmp_path / "classes.txt").write_text("\n".join(CLASSES))
    options = ["--validation_tar", tmp_path / "val.tar", "--classes", tmp_path / "classes.txt", "--prefix", "val"]
    options += ["--out", tmp_path / "out", "--num_shards", 2, "--num_workers", 1]
    truths = ground_truths(tmp_path, truth)
    make(*options, *truths[form])
    assert sorted(contents(tmp_path / "out", "val")) == [(i, CLASSES.index(name)) for i, name in enumerate(truth)]
    if form == "devkit":
        make(*options, *truths[form][:2], fails="--devkit_meta=meta.mat is required")
        truths["wnids"][1].write_text("n01\nn02\n")
        make(*options, *truths["wnids"], fails="has 2 lines, but the tar has 4 images")
        truths["wnids"][1].write_text("n01\nn02\nn09\nn01\n")
        make(*options, *truths["wnids"], fails="1 classes of")


def test_invalid_arguments_print_error_message(folder, tmp_path, make):
    common = ("--out", tmp_path / "out", "--num_shards", 2)
    make("--folder", tmp_path / "nowhere", *common, fails="is not a folder")
    (tmp_path / "flat").mkdir()
    make("--folder", tmp_path / "flat", *common, fails="has no class folders; expected")
    (folder / "n04").mkdir()
    make("--folder", folder, *common, fails="n04 has no image")
    (folder / "n04").rmdir()
    make(
        "--folder", folder, "--out", tmp_path / "out", "--num_shards", 99, fails="--num_shards=99 must be between 1 and"
    )
    make("--validation_tar", tmp_path / "no.tar", *common, fails=f"--validation_tar={tmp_path}/no.tar: expected a file")
    (folder / "n01" / "n01.v1_0.jpg").write_bytes(b"x")
    make("--folder", folder, *common, fails="two images have the key n01/n01_v1_0")
    make("--folder", folder, "--classes", "x", *common, fails="--classes and --devkit_meta require --validation_tar")
    make(*common, fails="--folder and --validation_tar: expected one of them")
    assert not list((tmp_path / "out").glob("*.tar"))


@pytest.mark.slow
def test_make_shards_script_runs(folder, tmp_path):
    command = [sys.executable, "data/make_shards.py", f"--folder={folder}", f"--out={tmp_path}/out", "--num_shards=2"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0 and "15 images of 3 classes in 2 shards" in done.stdout, done.stderr


def test_unreadable_images_are_omitted_and_listed_in_manifest(folder, tmp_path, make):
    (folder / "n01" / "bad.png").write_bytes(b"no image")
    cut = encode(np.zeros((64, 64, 3), dtype=np.uint8))
    (folder / "n02" / "cut.png").write_bytes(cut[: len(cut) // 2])
    options = ["--folder", folder, "--out", tmp_path / "out", "--num_shards", 2]
    said = make(*options)
    assert "omitted unreadable images (listed in the manifest): 2" in said and "15 images of 3" in said
    manifest = json.loads((tmp_path / "out/train-manifest.json").read_text())
    assert manifest["samples"] == 15 == sum(shard["samples"] for shard in manifest["shards"])
    assert len([key for shard in manifest["shards"] for key in shard.get("unreadable", [])]) == 2
    assert len(contents(tmp_path / "out", "train")) == 15
    (tmp_path / "out/train-manifest.json").unlink()  # as after a kill; the manifest is rebuilt from the shards
    assert make(*options).splitlines()[-2:] == said.splitlines()[-2:]
    assert json.loads((tmp_path / "out/train-manifest.json").read_text()) == manifest


def test_shard_without_readable_images_raises_error(tmp_path, capsys):
    for name in ("n01", "n02"):
        (tmp_path / "images" / name).mkdir(parents=True)
        (tmp_path / "images" / name / "bad.png").write_bytes(b"no image")
    asked = ["shards", f"--folder={tmp_path / 'images'}", f"--out={tmp_path / 'out'}", "--num_shards=2"]
    assert "none of its images can be read" in mistake(capsys, run, *asked)
    assert not (tmp_path / "out/train-manifest.json").exists()
