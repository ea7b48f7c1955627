"""`dcvision explain`: ablation, diversity, attribution, mixing, breakdown, circuits and reports of classifiers."""

import csv
import json
import re
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from timm.models import save_for_hf

import dcvision  # noqa: F401  registers dcvit_*
from dcmha import record_attention
from dcmha.analysis import measure_mixing
from dcvision.evaluation.images import readable_images
from dcvision.evaluation.networks import load_classifier
from tests.dctrain.explain.browser import needs_browser, opened
from tests.faults.fault_injection import mistake

from ..commands import run


def made(folder, name: str = "dcvit_digits_patch2_8", scale: float = 3.0, **options):
    """Save a random classifier of digits to a folder and return it."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10, **options).eval()
    torch.nn.init.normal_(model.get_classifier().weight)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(10 * scale if "project" in key else scale)
    save_for_hf(model, str(folder), safe_serialization=True)
    return model


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def losses(path) -> dict[str, float]:
    with open(path) as file:
        return {row["without"]: float(row["value"]) for row in csv.DictReader(file) if row["metric"] == "loss"}


@pytest.mark.slow
def test_disabled_branch_equals_branch_with_zero_weights(here):
    model = made(here / "model", depth=2)
    asked = ["--images=digits", "--limit=64"]
    run("explain", "ablate", "--checkpoint=model", *asked, "--off", "branches", "heads", "--out=out")
    found = losses("out/ablation.csv")
    heads = model.blocks[0].attn.num_heads
    assert len(found) == 1 + 11 + 2 * heads and len(set(found.values())) == len(found)
    assert (here / "out/model-ablation.png").stat().st_size > 10_000
    with torch.no_grad():
        for block in model.blocks:
            block.attn.compose.gate[heads : 2 * heads] = 0
    save_for_hf(model, "no gate", safe_serialization=True)
    run("evaluate", "--checkpoint=no gate", *asked, "--out=expected")
    (entry,) = json.loads((here / "expected/no gate.json").read_text())["results"].values()
    (expected,) = [m["value"] for m in entry["measures"] if m["metric"] == "loss"]
    assert found["post query gate"] == pytest.approx(expected, rel=1e-5)


def test_diversity_supports_vision_transformers_and_rejects_convnets(here, capsys):
    made(here / "composed", depth=2), made(here / "plain", "test_vit")
    run("explain", "diversity", "--checkpoint", "composed", "plain", "--out=out")
    with open("out/diversity.csv") as file:
        models = [row["model"] for row in csv.DictReader(file)]
    assert set(models) == {"composed", "plain"} and (here / "out/diversity.png").stat().st_size > 10_000
    made(here / "convolutions", "test_resnet")
    assert "convolutions: ResNet has no supported attention layers" in mistake(
        capsys, run, "explain", "diversity", "--checkpoint=convolutions"
    )


@pytest.mark.slow
def test_patch_attributions_sum_to_change_of_log_probability(here, capsys):
    model = made(here / "model", scale=1.0, depth=2)
    pixels = torch.randint(256, (8, 8, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    Image.fromarray(pixels.numpy()).save("image.png")
    asked = ("explain", "attribute", "--checkpoint=model", "--image=image.png")
    run(*asked, "--steps=128", "--target=3")
    assert "log-probability of class 3 for image.png" in capsys.readouterr().out
    found = {}
    with open("attribution/attribution.csv") as file:
        for row in csv.DictReader(file):
            found.setdefault(row["kind"], []).append(float(row["value"]))
    assert {kind: len(values) for kind, values in found.items()} == {"branches": 16, "heads": 8, "patches": 16}
    shown = load_classifier("model").prepare(Path("image.png").read_bytes())[None]
    with torch.no_grad():
        whole, gray = (model(x)[0].log_softmax(-1)[3] for x in (shown, torch.zeros_like(shown)))
    assert sum(found["patches"]) == pytest.approx(float(whole - gray), abs=0.01)
    for arguments, message in (
        (["--target=10"], "target='10'; expected a class from 0 to 9"),
        (["--image=none.png"], "cannot read the image none.png"),
        (["--over=tokens"], "over=['tokens']; expected one or more of branches, heads, patches"),
    ):
        assert message in mistake(capsys, run, *asked[: 3 if "image" in arguments[0] else 4], *arguments)


def test_attribution_over_images_matches_ablation(here, capsys):
    """The decrease without a single head equals the increase of the loss reported by `ablate`."""
    made(here / "model", scale=1.0, depth=2)
    pixels = torch.randint(256, (10, 8, 8, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    for number, image in enumerate(pixels):
        (here / "set" / str(number)).mkdir(parents=True)
        Image.fromarray(image.numpy()).save(here / "set" / str(number) / "0.png")
    asked = ("explain", "attribute", "--checkpoint=model", "--images=folder:set", "--batch_size=3", "--alone=true")
    run(*asked, "--steps=8", "--limit=60")
    printed = capsys.readouterr().out
    assert "mean log-probability of the labels of 10 images of folder:set" in printed
    assert printed.count("Rank correlation of attributions") == 2 and "Attributions by layer: blocks.0.attn " in printed
    run("explain", "ablate", "--checkpoint=model", "--images=folder:set", "--off=heads")
    with open("ablation/ablation.csv") as file:
        lost = {row["without"]: float(row["worse_by"]) for row in csv.DictReader(file) if row["metric"] == "loss"}
    with open("attribution/attribution.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["kind"] == "heads"]
    with open("ablation/ablation.csv") as file:
        top1 = [row for row in csv.DictReader(file) if row["metric"] == "top1"]
    whole, *others = (float(row["value"]) for row in top1)
    assert not top1[0]["stderr"] and len(others) == 8
    for value, row in zip(others, top1[1:], strict=True):  # each value is the mean over ten images
        expected = ((value * (1 - value) + whole * (1 - whole)) / 10) ** 0.5
        assert float(row["stderr"]) == pytest.approx(expected)
    for row in rows:
        assert float(row["alone"]) == pytest.approx(lost[f"{row['name']} of {row['layer']}"], abs=1e-6)
    for arguments, message in (
        ([], "no image is given; expected one of them"),
        (["--image=a.png", "--images=digits"], "image and images are both given"),
        (["--images=digits", "--target=3"], "target='3' requires image"),
        (["--images=digits", "--over=patches"], "over=['patches']; expected one or more of branches, heads"),
    ):
        assert message in mistake(capsys, run, *asked[:3], *arguments)


def test_mixing_over_images_matches_direct_measurement(here, capsys):
    model = made(here / "model", depth=2)
    run("explain", "mixing", "--checkpoint=model", "--images=digits", "--limit=5", "--batch_size=2", "--out=out")
    assert "compositions over 5 images of digits" in capsys.readouterr().out
    with open("out/mixing.csv") as file:
        found = {(row["layer"], row["what"]): float(row["mean"]) for row in csv.DictReader(file)}
    network = load_classifier("model")
    with torch.no_grad(), measure_mixing(model) as meters:
        model(torch.stack([image for _, image in readable_images(network, "digits", 5)]))
    expected = meters["blocks.1.attn"]["post"].mixing().sizes["key gate"]
    assert found["blocks.1.attn", "size of key gate"] == pytest.approx(expected.mean, rel=1e-5)
    assert (here / "out/mixing.png").stat().st_size > 10_000


def test_breakdown_of_patch_pair_matches_recorded_weights(here, capsys):
    model = made(here / "model", depth=2)
    pixels = torch.randint(256, (8, 8, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    Image.fromarray(pixels.numpy()).save("image.png")
    asked = ("explain", "breakdown", "--checkpoint=model", "--image=image.png")
    run(*asked, "--layer=blocks.0.attn", "--query=6", "--key=1")
    assert "blocks.0.attn, post-composition, from '1, 2' (6) to '0, 1' (1)" in capsys.readouterr().out
    shown = load_classifier("model").prepare(Path("image.png").read_bytes())[None]
    with torch.no_grad(), record_attention(model) as recorded:
        model(shown)
    with open("breakdown/breakdown.csv") as file:
        after = [float(row["value"]) for row in csv.DictReader(file) if row["term"] == "after"]
    assert after == pytest.approx(recorded["blocks.0.attn"].maps.composed_weights[0, :, 6, 1].tolist(), rel=1e-5)
    for arguments, message in (
        (["--query=16"], "query=16; expected 0 to 15 for 4 x 4 patches"),
        (["--key=16"], "key=16; expected -16 to 15"),
        (["--layer=3"], "layer=3; expected 0 to 1"),
    ):
        assert message in mistake(capsys, run, *asked, *arguments)


def test_circuits_find_head_that_writes_class(here, capsys):
    model = made(here / "plain", depth=2)
    images = list(readable_images(load_classifier("plain"), "digits", 40))
    with torch.no_grad():  # head 1 of the last layer writes a label prediction in the basis of the classifier
        tokens = {}
        hook = model.blocks[1].attn.register_forward_pre_hook(lambda _, args: tokens.update(x=args[0].mean(1)))
        model(torch.stack([image for _, image in images]))
        hook.remove()
        attn, width = model.blocks[1].attn, model.blocks[1].attn.head_dim
        labels = torch.tensor([label for label, _ in images])
        code = torch.linalg.lstsq(tokens["x"], torch.nn.functional.one_hot(labels, width).float()).solution.T
        attn.qkv.weight[2 * attn.dim + width : 2 * attn.dim + 2 * width] = code
        attn.proj.weight[:, width : 2 * width] = 0
        attn.proj.weight[:, width : width + 10] = torch.linalg.pinv(model.head.weight)
    save_for_hf(model, "model", safe_serialization=True)
    run("explain", "circuits", "--checkpoint=model", "--images=digits", "--limit=40", "--top=1", "--out=out")
    with open("out/heads.csv") as file:
        found = {(row["layer"], int(row["head"])): float(row["in_top"]) for row in csv.DictReader(file)}
    assert max(found, key=found.get) == ("blocks.1.attn", 1) and len(found) == 8
    assert "blocks.1.attn head 1, best by the image's own class" in capsys.readouterr().out


@pytest.mark.slow
def test_report_has_expected_figures_and_no_external_links(here):
    made(here / "model", scale=1.0, depth=2), made(here / "plain", "test_vit", scale=1.0)
    pixels = torch.randint(256, (8, 8, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    Image.fromarray(pixels.numpy()).save("image.png")
    for name, pictures in (("model", 4), ("plain", 2)):
        asked = [f"--checkpoint={name}", "--image=image.png", "--steps=2", f"--out={name}.html"]
        run("explain", "report", *asked)
        text = Path(f"{name}.html").read_text()
        assert text.count("<svg ") == pictures and "http" not in text
        assert ("Plain attention: the model has no composition" in text) == (name == "plain")
    assert "no attention layers that support recording" in text


@pytest.mark.slow
@needs_browser
def test_report_shows_composed_weights_of_selected_query(here):
    model = made(here / "model", scale=1.0, depth=2)
    pixels = torch.randint(256, (8, 8, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    Image.fromarray(pixels.numpy()).save("image.png")
    run("explain", "report", "--checkpoint=model", "--image=image.png", "--steps=2")
    with torch.no_grad(), record_attention(model) as recorded:
        model(load_classifier("model").prepare(Path("image.png").read_bytes())[None])
    expected = recorded["blocks.1.attn"].maps.composed_weights[0, 3]
    document = opened(here / "report.html", "layer=1&head=3&query=5")
    shown = re.search(r'<canvas id="after"[^>]*data-values="([^"]*)"', document)[1].split()
    assert [float(value) for value in shown] == pytest.approx(
        expected[5].tolist(), abs=float(expected.abs().max()) / 250
    )


def test_circuits_support_layer_scale_and_windowed_attention(here):
    """If a layer scale is nonzero in only one channel, the classifier weights of that channel rank the classes."""
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=10, init_values=1.0)
    torch.nn.init.normal_(model.head.weight)
    with torch.no_grad():
        model.blocks[0].ls1.gamma.zero_()[5] = 1.0
    save_for_hf(model, "scaled", model_config={"input_size": [3, 160, 160]}, safe_serialization=True)
    swin = {"img_size": 32, "window_size": 2, "embed_dim": 16, "depths": (1, 1), "num_heads": (2, 2), "patch_size": 2}
    model = timm.create_model("swin_tiny_patch4_window7_224", num_classes=10, **swin)
    save_for_hf(model, "windows", model_args=swin, safe_serialization=True)
    for name, heads in (("scaled", 4), ("windows", 2)):
        asked = ["--images=digits", "--limit=6", "--batch_size=4", "--top=10"]
        run("explain", "circuits", f"--checkpoint={name}", *asked, f"--out={name}-out")
        with open(f"{name}-out/heads.csv") as file:
            assert len(list(csv.DictReader(file))) >= heads
    with open("scaled-out/circuits.csv") as file:
        rows = [row for row in csv.DictReader(file) if (row["layer"], row["head"]) == ("blocks.0.attn", "0")]
    (source, *_) = [row["source"] for row in rows]
    order = [int(row["writes"].split()[-1]) for row in rows if row["source"] == source]
    reads = timm.create_model("local-dir:scaled", pretrained=True).head.weight[:, 5]
    assert order in (reads.argsort().tolist(), reads.argsort(descending=True).tolist())


def test_images_with_out_of_range_classes_are_rejected(here, capsys):
    made(here / "model", depth=1)
    for number in range(11):
        (here / f"images/c{number:02}").mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(here / f"images/c{number:02}/a.png")
    asked = ("explain", "circuits", "--checkpoint=model", "--images=folder:images")
    assert "folder:images has a class 10; the model has 10" in mistake(capsys, run, *asked)


def test_breakdown_of_static_composition_has_only_base_term(here):
    made(here / "model", depth=1, rank=0, dynamic_gate=False, static_base=True)
    Image.new("RGB", (8, 8)).save("image.png")
    run("explain", "breakdown", "--checkpoint=model", "--image=image.png")
    with open("breakdown/breakdown.csv") as file:
        assert [row["term"] for row in csv.DictReader(file)][::4] == ["before", "base", "after"]
