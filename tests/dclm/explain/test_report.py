"""`dclm explain report`: a self-contained page, tested in a browser and at the screen size of a phone."""

import base64
import json
import re

import numpy as np
import pytest
import torch

from dclm.load import load_model
from dcmha import record_attention
from tests.dctrain.explain.browser import PHONE, needs_browser, opened, title
from tests.faults.fault_injection import mistake

from ..commands import run
from ..evaluation.models import small_folder

PROMPT = "def isabstract(self):\n    $\\frac$ </script>"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    small_folder(folder / "model")
    run(
        "explain", "report", f"--checkpoint={folder}/model", f"--prompt={PROMPT}", "--steps=2", f"--out={folder}/r.html"
    )
    return folder / "r.html"


@pytest.fixture(scope="module")
def recorded(models):
    model = load_model(models / "model")
    ids = torch.from_numpy(model.tokenizer.encode([PROMPT])[0].astype("int64"))[None]
    with torch.no_grad(), record_attention(model.decoder) as recorded:
        model.decoder(ids)
    return recorded


def test_page_is_self_contained_and_includes_attention_maps(page, recorded):
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"(?:src|href)=\"(?!data:|#)", text) and "http" not in text
    assert text.count("<svg ") == 4 and "| ---" not in text and "<pre>" not in text
    assert text.count("<table>") == 5 + 6  # tables of all numbers, and of the most important numbers
    data = json.loads(re.search(r'id="attention-data">(.*?)</script>', text, re.DOTALL)[1])
    assert "".join(data["words"]) == PROMPT
    for layer in data["layers"]:
        maps = recorded[layer["name"]]
        for stage, expected in (("before", maps.uncomposed_weights[0]), ("after", maps.maps.composed_weights[0])):
            levels = np.frombuffer(base64.b64decode(layer[stage]), np.int8).reshape(expected.shape)
            values = torch.from_numpy(levels / 127) * torch.tensor(layer[f"{stage}_scale"])[..., None]
            assert ((values - expected).abs() <= expected.abs().amax(2, keepdim=True) / 250).all()


@needs_browser
def test_page_shows_attention_of_selected_head(page, recorded):
    """The fragment of the URL or the pointer over a button selects the head."""
    maps = recorded["blocks.1.attn"].maps.composed_weights[0]
    for script, head in (
        ("", 2),
        ('document.querySelectorAll("#heads button")[3].dispatchEvent(new Event("pointerenter"))', 3),
    ):
        document = opened(page, "layer=1&head=2&query=4", script)
        after = re.search(r'id="after">(.*?)</div>', document, re.DOTALL)[1]
        shown = [float(value) for value in re.findall(r'title="(-?[\d.]+)"', after)]
        expected = maps[head, 4]
        assert shown == pytest.approx(expected.tolist(), abs=float(expected.abs().max()) / 250 + 5e-4)
        assert f"blocks.1.attn, head {head}: where" in document
        assert re.findall(r'<span[^>]*class="asks"', after)


@needs_browser
def test_tables_sort_by_clicked_column(page):
    script = """
    const isOfCredits = (one) => one.querySelectorAll("th")[4]?.textContent === "value";
    const table = [...document.querySelectorAll("table")].find(isOfCredits);
    const values = () => [...table.tBodies[0].rows].map((row) => Number(row.cells[4].textContent));
    const found = [];
    for (const turn of [0, 1]) { table.querySelectorAll("th")[4].click(); found.push(values()); }
    document.title = JSON.stringify(found);
    """
    down, up = json.loads(title(opened(page, script=script)))
    assert down == sorted(down, reverse=True) and up == down[::-1] and len(set(down)) > 10


@needs_browser
def test_page_fits_phone_screen(page):
    script = """
    const texts = [...document.querySelectorAll("svg text")].filter((one) => one.textContent.trim());
    const letters = texts.map((one) => Math.max(one.getBoundingClientRect().height, one.getBoundingClientRect().width));
    document.title = `${document.documentElement.scrollWidth} ${window.innerWidth} ${Math.min(...letters)}`;
    """
    wide, screen, letters = map(float, title(opened(page, script=script, size=PHONE)).split())
    assert wide <= screen and letters >= 7


@needs_browser
def test_all_heads_of_a_layer_show_full_maps(page, recorded):
    """A click on a figure selects its head. Each figure shows the full map of its head."""
    script = """
    document.querySelectorAll("#all-heads figure")[3].click();
    const canvas = document.querySelectorAll("#all-heads canvas")[3];
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    document.title = JSON.stringify([...pixels].filter((_, at) => at % 4 === 3));
    """
    document = opened(page, "layer=1&head=2&query=4", script)
    strengths = torch.tensor(json.loads(title(document))).float() / 255
    expected = recorded["blocks.1.attn"].maps.composed_weights[0, 3]
    torch.testing.assert_close(
        strengths.view_as(expected), 0.75 * (expected / expected.abs().max()).abs(), atol=0.01, rtol=0
    )
    assert "blocks.1.attn, head 3: where" in document and document.count('class="small"') == len(
        recorded["blocks.1.attn"].maps.composed_weights[0]
    )


def test_plain_model_report_has_no_composition(here):
    run("explain", "report", "--checkpoint=plain", f"--prompt={PROMPT}", "--steps=2")
    text = (here / "report.html").read_text(encoding="utf-8")
    assert "Plain attention: the model has no composition." in text
    assert text.count("<svg ") == 2 and '"name": "blocks.1.attn"' in text


def test_invalid_arguments_report_error(here, capsys):
    asked = ("explain", "report", "--checkpoint=model")
    assert "target='qqq' is" in mistake(capsys, run, *asked, f"--prompt={PROMPT}", "--target=qqq")
    assert "steps=0" in mistake(capsys, run, *asked, f"--prompt={PROMPT}", "--steps=0")
    (here / "file").write_text("")
    taken = mistake(capsys, run, *asked, f"--prompt={PROMPT}", "--out=file", "--steps=2")
    assert "file" in taken


def test_out_option_accepts_a_folder(here, capsys):
    run("explain", "report", "--checkpoint=plain", f"--prompt={PROMPT}", "--steps=2", "--out=pages/first")
    assert capsys.readouterr().out.strip() == "pages/first/index.html"
    assert (here / "pages/first/index.html").read_text(encoding="utf-8").startswith("<!doctype html>")
