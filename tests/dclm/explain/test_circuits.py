"""`dclm explain circuits`: planted circuits are found, and logits follow equation 12."""

import csv

import pytest
import torch

import dclm
from dclm.data.tokenizers import ByteTokenizer
from dclm.load import load_model
from tests.faults.fault_injection import mistake

from ..commands import run
from ..evaluation.models import small_folder


def read(path) -> list[dict]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def planted(folder) -> None:
    """Save a byte model in which head 1 of layer 0 copies and head 0 of layer 1 writes the next byte."""
    torch.manual_seed(0)
    vocabulary = ByteTokenizer().vocab_size
    shape = {"num_layers": 2, "num_heads": 2, "dim": 600, "mlp_dim": 8}
    decoder = dclm.Decoder(dclm.decoder_config("dcformer_pp_debug", vocab_size=vocabulary, **shape))
    codes = torch.eye(600)[:vocabulary]  # one channel per token; a head has 300 channels, enough for all tokens
    with torch.no_grad():
        decoder.embed.weight.copy_(codes), decoder.output.weight.copy_(codes)
        for block in decoder.blocks:
            block.attn.qkv.weight.zero_(), block.attn.proj.weight.zero_(), block.mlp.down.weight.zero_()
        for layer, head, shift in ((0, 1, 0), (1, 0, 1)):
            attn, rows = decoder.blocks[layer].attn, torch.arange(vocabulary)
            attn.qkv.weight[1200 + 300 * head + rows, rows] = 1.0
            attn.proj.weight[(rows + shift) % vocabulary, 300 * head + rows] = 1.0
    dclm.save_pretrained(decoder, folder)


def test_planted_circuits_are_found(here, capsys):
    planted(here / "planted")
    (here / "next.tsv").write_text("a\tb\nx\ty\n")
    asked = ["--words", "a", "--relations", "next.tsv", "--tokenizer=bytes", "--top=3", "--out=out"]
    run("explain", "circuits", "--checkpoint=planted", *asked)
    found = {(row["layer"], int(row["head"]), row["relation"]): row for row in read("out/heads.csv")}
    assert len(found) == 2 * 2 * 2
    copies, follows = found["blocks.0.attn", 1, "copy"], found["blocks.1.attn", 0, "next"]
    for row, others in ((copies, found["blocks.1.attn", 0, "copy"]), (follows, found["blocks.0.attn", 1, "next"])):
        assert float(row["mean_reciprocal_rank"]) == float(row["in_top"]) == 1.0 > float(others["mean_reciprocal_rank"])
    first = {(r["layer"], int(r["head"])): r["writes"] for r in read("out/circuits.csv") if r["rank"] == "1"}
    assert (first["blocks.0.attn", 1], first["blocks.1.attn", 0]) == ("a", "b")
    printed = capsys.readouterr().out
    assert "blocks.0.attn head 1, best by copy" in printed and "blocks.1.attn head 0, best by next" in printed
    assert (here / "out/heads.png").stat().st_size > 5_000


def test_logits_match_equation_12(here):
    small_folder(here / "pythia", name="dcpythia_debug")
    run("explain", "circuits", "--checkpoint=pythia", "--words= the", "--top=400", "--out=out")
    decoder, tokenizer = load_model("pythia")
    block = decoder.blocks[1]
    with torch.no_grad():
        x = decoder.embed(torch.tensor([int(tokenizer.encode([" the"])[0][0])]))
        x = block.attn_norm(x + decoder.blocks[0].mlp(decoder.blocks[0].mlp_norm(x)))
        value, output = block.attn.qkv.weight[64 + 8 : 64 + 16], block.attn.proj.weight[:, 8:16]
        expected = (x @ value.T @ output.T @ decoder.output.weight.T)[0]
    rows = [r for r in read("out/circuits.csv") if (r["layer"], r["head"]) == ("blocks.1.attn", "1")]
    assert [float(row["logit"]) for row in rows] == pytest.approx(
        expected.sort(descending=True).values.tolist(), abs=1e-5
    )
    assert [int(row["rank"]) for row in rows] == list(range(1, 401))


@pytest.mark.parametrize(
    ("words", "pairs", "message"),
    [
        ("isabstract", None, "'isabstract' is "),
        ("the", None, "expected one; ' the' is a single token"),
        (" the", "a b\n", "pairs.tsv: line 1 is not a pair; expected a tab-separated token and partner per line"),
        (" the", "", "pairs.tsv is empty"),
    ],
)
def test_invalid_arguments_report_error(here, capsys, words, pairs, message):
    relations = [] if pairs is None else ["--relations=pairs.tsv"]
    (here / "pairs.tsv").write_text(pairs or "")
    assert message in mistake(capsys, run, "explain", "circuits", "--checkpoint=model", f"--words={words}", *relations)
