"""`dclm explain diversity`: figure 5 for arbitrary models."""

import csv
import json
from pathlib import Path

from torchvision.io import decode_image

import dclm
from dcmha.analysis import model_diversity
from dctrain.evaluation.results import checksum

from ..commands import run


def test_table_and_plot_compare_diversity_of_models(here, capsys):
    run("explain", "diversity", "--checkpoint", "model", "plain", "--out=out")
    with open("out/diversity.csv") as file:
        rows = {(row["model"], row["layer"], row["kind"]): row for row in csv.DictReader(file)}
    assert len(rows) == 2 * 2 * 2
    for model in ("model", "plain"):
        for layer, found in model_diversity(dclm.load_pretrained(model)).items():
            for kind, curve in (("QK", found.qk), ("OV", found.ov)):
                row = rows[model, layer, kind]
                assert float(row["mean_captured"]) == float(curve.mean()) and int(row["components"]) == len(curve) == 32
                count = round(32 * float(row["components_for_90"]))
                assert curve[count - 1] >= 0.9 > curve[count - 2]
    origins = json.loads(Path("out/diversity.json").read_text())["models"]
    assert [origin["checkpoint"] for origin in origins] == ["model", "plain"]
    assert origins[0]["weights_crc32"] == checksum(dclm.load_pretrained("model")) != origins[1]["weights_crc32"]
    picture = decode_image("out/diversity.png")[:3].float()
    assert min(picture.shape[1:]) > 300 and (picture.flatten(1).std(1) > 5).all()
    printed = capsys.readouterr().out
    mean = sum(float(row["mean_captured"]) for key, row in rows.items() if key[::2] == ("plain", "OV")) / 2
    assert f"{100 * mean:.1f} %" in next(line for line in printed.splitlines() if "plain" in line and "OV" in line)
