"""`dclm explain ablate`: ablation of a part equals a model whose weights of this part are zero."""

import csv
import json
import math

import pytest
import torch

import dclm
from tests.faults.fault_injection import mistake

from ..commands import run
from ..evaluation.models import SOURCES, numbers, write_records

TEXT = str(SOURCES[1])
NAME = SOURCES[1].name


def rows(path) -> dict[tuple[str, str], dict]:
    """Return the rows of ablation.csv, keyed by ablated part and metric."""
    with open(path) as file:
        return {(row["without"], row["metric"]): row for row in csv.DictReader(file)}


def edited(folder, source, change) -> None:
    """Save a copy of a model with changed weights."""
    decoder = dclm.load_pretrained(source)
    with torch.no_grad():
        change(decoder)
    folder.mkdir()
    dclm.save_pretrained(decoder, folder)
    (folder / "tokenizer.json").write_text((source / "tokenizer.json").read_text())


def no_second_layer(decoder) -> None:
    compose = decoder.blocks[1].attn.compose
    compose.gate.zero_(), compose.project.zero_()


def no_head(decoder) -> None:
    decoder.blocks[0].attn.proj.weight[:, 16:24] = 0


def test_ablation_equals_zero_weights(here, capsys):
    run(
        "explain",
        "ablate",
        "--checkpoint=model",
        f"--texts={TEXT}",
        "--off",
        "branches",
        "layers",
        "heads",
        "--out=out",
    )
    printed = capsys.readouterr().out
    found = rows(here / "out/ablation.csv")
    for name, change in (("composition of blocks.1.attn", no_second_layer), ("head 2 of blocks.0.attn", no_head)):
        edited(here / name, here / "model", change)
        run("evaluate", f"--checkpoint={name}", f"--texts={TEXT}", f"--out=out {name}")
        expected = numbers(here / f"out {name}" / f"{name}.json")
        assert float(found[name, "loss"]["value"]) == pytest.approx(math.log(expected[NAME, "perplexity"]), rel=1e-6)
        assert float(found[name, "bits_per_byte"]["value"]) == pytest.approx(expected[NAME, "bits_per_byte"], rel=1e-6)
    whole = float(found["", "loss"]["value"])
    for (name, metric), row in found.items():
        if metric == "loss":
            assert float(row["worse_by"]) == pytest.approx(float(row["value"]) - whole)
            assert not name or row["kind"] == "heads" or f"| {name} " in printed
    kinds = [row["kind"] for (_, metric), row in found.items() if metric == "loss"]
    assert [kinds.count(kind) for kind in ("", "branches", "layers", "heads")] == [1, 11, 2, 8]
    assert (here / "out/model-ablation.png").stat().st_size > 10_000


def test_measured_ablations_are_reused(here, capsys):
    asked = ("explain", "ablate", "--checkpoint=model", f"--texts={TEXT}", "--out=out")
    run(*asked, "--off=layers")
    first = json.loads((here / "out/model.json").read_text())["results"]
    capsys.readouterr()
    run(*asked, "--off", "layers", "heads")
    assert capsys.readouterr().out.count(" measured") == 8
    both = json.loads((here / "out/model.json").read_text())["results"]
    assert both.items() >= first.items() and len(both) == 11


def test_ablations_with_different_limit_are_excluded(here):
    """Heads of an earlier run with fewer documents are not compared with the full model of a later run."""
    asked = ("explain", "ablate", "--checkpoint=model", "--texts=texts.jsonl", "--out=out")
    write_records(here / "texts.jsonl", [{"text": source.read_text()[:400]} for source in SOURCES])
    run(*asked, "--off=heads", "--limit=1")
    run(*asked, "--off=layers", "--limit=2")
    found = rows(here / "out/ablation.csv")
    assert {name for name, _ in found} == {"", "composition of blocks.0.attn", "composition of blocks.1.attn"}
    run(*asked, "--off=heads", "--limit=2")
    assert len(rows(here / "out/ablation.csv")) == 2 * (1 + 2 + 8)


def test_files_with_equal_names_are_kept_separate(here, capsys):
    for folder, source in zip("ab", SOURCES, strict=False):
        (here / folder).mkdir()
        (here / folder / "val.txt").write_text(source.read_text())
        run("explain", "ablate", "--checkpoint=model", f"--texts={folder}/val.txt", "--off=layers", "--out=out")
    with open("out/ablation.csv") as file:
        values = {row["title"]: row["value"] for row in csv.DictReader(file) if row["metric"] == "loss"}
    printed = capsys.readouterr().out.rpartition("Without parts of the model")[2]
    assert len(set(values.values())) == 2 and all(printed.count(f"model, {title}") == 1 for title in values)


def test_plain_model_ablates_heads_only(here, capsys):
    asked = ("explain", "ablate", "--checkpoint=plain", f"--texts={TEXT}")
    assert "off=branches: Decoder has no layer that composes heads" in mistake(capsys, run, *asked, "--off=branches")
    run(*asked)
    assert "plain attention: the model has no composition" in capsys.readouterr().out
    assert len(rows(here / "ablation/ablation.csv")) == 2 * 9


def test_results_of_evaluate_are_excluded(here, capsys):
    """The results of `dclm evaluate` are in the same file and have no ablated parts."""
    run("evaluate", "--checkpoint=model", f"--texts={SOURCES[0]}", "--out=out")
    run("explain", "ablate", "--checkpoint=model", f"--texts={TEXT}", "--off=layers", "--out=out")
    with open(here / "out/ablation.csv") as file:
        assert {row["title"] for row in csv.DictReader(file)} == {f"texts {TEXT}"}
    before = (here / "out/model-ablation.png").read_bytes()
    run("explain", "ablate", "--checkpoint=model", f"--texts={SOURCES[0]}", "--off=layers", "--out=out")
    assert len((here / "out/model-ablation.png").read_bytes()) > 1.3 * len(before)  # one row per text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--off=gates"], "off=['gates']; expected one or more of branches, layers, heads"),
        (["--off", "heads", "heads"], "off=['heads', 'heads']; expected"),
        (["--texts=nowhere.txt"], "nowhere.txt"),
        (["--limit=0"], "limit=0 must be at least 1"),
    ],
)
def test_invalid_arguments_report_error(here, capsys, arguments, message):
    texts = [] if "texts" in arguments[0] else [f"--texts={TEXT}"]
    assert message in mistake(capsys, run, "explain", "ablate", "--checkpoint=model", *texts, *arguments)


def test_explain_lists_its_subcommands(capsys):
    assert "dclm explain requires a second word; expected ablate, attribute" in mistake(capsys, run, "explain")
    assert "'circuit' is unknown to dclm explain; expected ablate, attr" in mistake(capsys, run, "explain", "circuit")
    run("explain", "--help")
    assert "ablate    Evaluate a trained model with" in capsys.readouterr().out
