"""`dcvision evaluate`: runs compared with `validate`, timm models compared with timm, reassessed ImageNet labels."""

import json
import re

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.data import create_transform, resolve_data_config
from timm.models import save_for_hf

from dcvision.evaluation import images as evaluation
from tests.faults.fault_injection import mistake

from .commands import run
from .test_init import common


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def made(folder, seed=0, **options):
    """Save a random timm model with non-default preprocessing to a folder and return it."""
    torch.manual_seed(seed)
    model = timm.create_model("test_vit", num_classes=12, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2 if parameter.dim() > 1 else 1)
    save_for_hf(
        model, str(folder), model_config={"crop_pct": 0.7, "interpolation": "bilinear"}, safe_serialization=True
    )
    return model


def pictures(folder, names):
    """Write noise images of different sizes."""
    generator = torch.Generator().manual_seed(0)
    for number, name in enumerate(names):
        path = folder / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = torch.randint(256, (9 + number, 12, 3), generator=generator, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).resize((200 + 10 * number, 180)).save(path)
    return folder


def predictions(folder, paths):
    """Return timm's predictions for images: the classes of each image in descending order of probability."""
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    transform = create_transform(**resolve_data_config({}, model=model))
    with torch.inference_mode():
        return [
            model(transform(Image.open(path).convert("RGB"))[None])[0].argsort(descending=True).tolist()
            for path in paths
        ]


def numbers(path):
    entries = json.loads(path.read_text())["results"].values()
    return {(m["name"], m["metric"]): m["value"] for entry in entries for m in entry["measures"]}


def test_accuracy_matches_best_validation_accuracy_of_run(here, capsys):
    options = ["--model.model=dcvit_digits_patch2_8", "--trainer.max_epochs=3", "--data.crop_fraction=1.0"]
    run("fit", *common(here), *options, "--model.lr=0.005", "--data.min_crop_area=0.9")
    best = re.search(r"best val/top1 ([\d.]+) %", capsys.readouterr().out)[1]
    run("evaluate", "--checkpoint", "t/version_0", "--images", "digits")
    found = numbers(here / "evaluation" / "t-version_0.json")
    assert f"{100 * found['digits', 'top1']:.2f}" == best
    assert found["digits, batches of 64", "images_per_second"] > 0
    row = rf"\| digits +\| top1 \(%\) +\| +{100 * found['digits', 'top1']:.1f} \|"
    assert re.search(row, capsys.readouterr().out)


def test_timm_model_uses_timm_preprocessing_and_numbered_folders_are_class_numbers(here):
    """Folders 2 and 10 are classes 2 and 10, independent of the alphabetical order of their names."""
    made(here / "model")
    names = [f"{label}/a{number}" for label in (2, 10, 11) for number in range(3)]
    folder = pictures(here / "v2", names)
    ranked = predictions(here / "model", [folder / f"{name}.png" for name in names])
    labels = [int(name.partition("/")[0]) for name in names]
    for size in (2, 64):
        options = [f"--batch_size={size}", f"--num_workers={int(size > 2)}", f"--out=out{size}"]
        run("evaluate", "--checkpoint=model", "--images", "folder:v2", *options)
        found = numbers(here / f"out{size}" / "model.json")
        assert found["v2", "top1"] == sum(row[0] == label for row, label in zip(ranked, labels, strict=True)) / 9
        assert found["v2", "top5"] == sum(label in row[:5] for row, label in zip(ranked, labels, strict=True)) / 9


def test_reassessed_labels_are_matched_by_image_name(here, capsys):
    made(here / "model")
    names = [f"n{number % 3}/ILSVRC2012_val_{number:08d}" for number in (1, 2, 3, 5, 6)]
    folder = pictures(here / "val", names)
    ranked = predictions(here / "model", [folder / f"{name}.png" for name in names])
    real = [[row[0]] for row in ranked[:2]] + [[(ranked[2][0] + 1) % 12], [7], [], [ranked[4][0], 3]]
    (here / "real.json").write_text(json.dumps(real))
    run("evaluate", "--checkpoint=model", "--images", "folder:val", "--real=real.json")
    assert numbers(here / "evaluation" / "model.json")["val, ReaL", "top1"] == 3 / 4  # image 5 has no label
    made(here / "other", seed=1)
    capsys.readouterr()
    run("evaluate", "--checkpoint=other", "--images", "folder:val", "--compare", "evaluation/model.json")
    model, other = (numbers(here / "evaluation" / f"{name}.json")["val", "top5"] for name in ("model", "other"))
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| val ") and "top5" in line]
    assert f"{100 * model:.1f}" in row and f"{100 * other:.1f} / {100 * (other - model):+.1f}" in row


def test_interrupted_evaluation_resumes(here, monkeypatch):
    made(here / "model")
    pictures(here / "val", [f"{label}/a{number}" for label in (0, 1) for number in range(6)])
    asked = ("evaluate", "--checkpoint=model", "--images", "folder:val", "--batch_size=2")
    run(*asked, "--out=whole")
    real, calls = evaluation._classify, []

    def classify(answerer, images):
        if len(calls) == 4:
            raise KeyboardInterrupt
        calls.append(len(images))
        return real(answerer, images)

    monkeypatch.setattr(evaluation, "_classify", classify)
    with pytest.raises(SystemExit):
        run(*asked, "--out=out")
    monkeypatch.setattr(evaluation, "_classify", lambda *args: calls.append(2) or real(*args))
    run(*asked, "--out=out")
    assert sum(calls) == 12
    expected, found = (numbers(here / name / "model.json") for name in ("whole", "out"))
    assert {k: v for k, v in found.items() if "batches" not in k[0]} == {
        k: v for k, v in expected.items() if "batches" not in k[0]
    }


def test_unreadable_images_are_reported(here, capsys):
    made(here / "model")
    pictures(here / "val", ["0/a", "1/b", "1/c"])
    (here / "val" / "1" / "d.png").write_bytes(b"no image")
    run("evaluate", "--checkpoint=model", "--images", "folder:val")
    assert "1 images could not be read and are not included" in capsys.readouterr().out


def test_nan_logits_raise_error_and_write_no_result(here, capsys):
    made(here / "model")
    pictures(here / "val", ["0/a", "1/b"])
    weights = load_file(here / "model" / "model.safetensors")
    weights["norm.weight"] *= float("nan")
    save_file(weights, here / "model" / "model.safetensors")
    error = mistake(capsys, run, "evaluate", "--checkpoint=model", "--images", "folder:val")
    assert "the logits are NaN" in error and not (here / "evaluation" / "model.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checkpoint=model"], "nothing to measure; expected images"),
        (["--checkpoint=none", "--images", "folder:val"], "none is not a file, folder or timm model"),
        (["--checkpoint=model", "--images", "val"], "data set 'val' is unknown; expected digits"),
        (["--checkpoint=model", "--images", "folder:big"], "labels reach 900; the model has 12 classes"),
        (["--checkpoint=model", "--images", "folder:val", "--real=none"], "real=none does not exist"),
        (["--checkpoint=model", "--images", "folder:val", "--real=real.json"], "is not one of its 1 images; expected"),
        (["--checkpoint=model", "--images", "folder:val", "--real=bad.json"], "is not a list of lists of classes"),
        (["--checkpoint=model", "--images", "folder:val", "--dtype=int8"], "dtype='int8'; expected float32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_arguments_print_one_line_error(here, capsys, arguments, message):
    made(here / "model")
    pictures(here / "val", ["0/a", "1/b"])
    pictures(here / "big", ["0/a", "900/b"])
    (here / "real.json").write_text("[[1]]")
    (here / "bad.json").write_text('{"a": 1}')
    assert message in mistake(capsys, run, "evaluate", *arguments)
