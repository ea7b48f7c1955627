"""Every YAML file is accepted by the real parser, names an existing model, and has a complete header."""

import re
from pathlib import Path

import pytest
import timm
import yaml

import dclm
import dclm.cli
import dcvision.cli
import dcvl.cli
from dclm.config import build_config
from dctrain.compare.experiment import read_experiment

ROOT = Path(__file__).parents[2]
MAINS = {"dcvision": dcvision.cli.main, "dclm": dclm.cli.main, "dcvl": dcvl.cli.main}
PROGRAMS = {"vision": "dcvision", "lm": "dclm", "vl": "dcvl"}
CONFIGS = sorted(path for folder in PROGRAMS for path in (ROOT / "configs" / folder).glob("*.yaml"))


def name(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


@pytest.mark.parametrize("path", CONFIGS, ids=name)
def test_config_is_accepted_by_the_command_line(path, capsys):
    program = PROGRAMS[path.parent.name]
    with pytest.raises(SystemExit) as exit_info:
        MAINS[program](["fit", "--config", str(path), "--print_config"])
    assert not exit_info.value.code, capsys.readouterr().err
    config = yaml.safe_load(path.read_text())
    assert config["model"]["model"] in (dclm.CONFIGS if program == "dclm" else timm.list_models())
    parsed = yaml.safe_load(capsys.readouterr().out)
    assert parsed["model"]["lr"] == config["model"]["lr"]


LARGE = ("2b8", "6b9")  # in names of models with billions of parameters; the first tier plans one of them
PLANNED = [
    pytest.param(path, marks=[pytest.mark.slow] * (path.stem != "dcpythia_6b9" and any(n in path.stem for n in LARGE)))
    for path in CONFIGS
]


@pytest.mark.parametrize("path", PLANNED, ids=lambda path: name(path))
def test_config_is_planned_at_its_world_size(path, capsys):
    """The mesh is valid and the model fits into the memory of a rank (meta device, fake process group)."""
    MAINS[PROGRAMS[path.parent.name]](["plan", "--config", str(path), "--trainer.devices=8"])
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line[0] != " ")
    config = yaml.safe_load(path.read_text())
    world = 8 * config["trainer"].get("num_nodes", 1)
    sharding = f"{world} shards" if config["trainer"].get("strategy") == "fsdp2" else "each with the full model"
    assert lines["mesh"] == f"{world} ranks ({world // 8} x 8), {sharding}"
    assert lines["model"].startswith(config["model"]["model"])


@pytest.mark.parametrize("path", CONFIGS, ids=name)
def test_config_header_is_complete(path):
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    for fact in ("command:", "hardware:", "time:", "result:"):
        assert any(line.startswith(f"# {fact}") for line in header), fact
    assert f" {PROGRAMS[path.parent.name]} fit --config configs/{name(path)}" in path.read_text()
    assert len(path.read_text().splitlines()) <= 60


@pytest.mark.parametrize("path", [p for p in CONFIGS if "sbatch" in p.read_text()], ids=name)
def test_slurm_job_has_node_count_of_config(path):
    nodes = re.search(r"#SBATCH --nodes=(\d+)", (ROOT / "configs/launch/slurm.sh").read_text())
    nodes = re.search(r"sbatch --nodes (\d+)", path.read_text()) or nodes
    assert int(nodes[1]) == yaml.safe_load(path.read_text())["trainer"]["num_nodes"]


@pytest.mark.parametrize("path", [p for p in CONFIGS if p.parent.name == "lm"], ids=name)
def test_documented_models_and_overrides_of_language_config_are_valid(path):
    """Models named in comments exist, and documented overrides give valid models."""
    text = path.read_text()
    config = yaml.safe_load(text)
    stems = {config.stem for config in CONFIGS}
    for model in re.findall(r"\b(?:dcformer|transformer|dcpythia|pythia)_\w+", text):
        assert model in dclm.CONFIGS or model in stems, model
    fixed = (config["data"].get("vocab_size", 512), config["data"]["context_length"])
    base = config["model"].get("overrides", {})
    rows = [yaml.safe_load(row) for row in re.findall(r"^#  .*?(\{.*?\})", text, re.MULTILINE)]
    configs = [build_config(config["model"]["model"], *fixed, base | row) for row in [{}, *rows]]
    assert len({str(c) for c in configs}) == 1 + len(rows)
    assert len(rows) == {"405m.yaml": 13, "dcpythia_6b9_table10.yaml": 4}.get(path.name, 0)


def test_tokens_per_step_of_paper_config_match_paper():
    """A step has 0.5 M tokens for the scaling curves and 2 M tokens for the large models."""
    for path in (ROOT / "configs/lm").glob("*.yaml"):
        config = yaml.safe_load(path.read_text())
        if config["data"]["context_length"] != 2048:
            continue
        trainer, data = config["trainer"], config["data"]
        devices = trainer["devices"] * trainer.get("num_nodes", 1)
        tokens = data["batch_size"] * trainer["accumulate_grad_batches"] * devices * data["context_length"]
        assert tokens == (2**21 if re.search("2b8|6b9", path.name) else 2**19), path.name
        assert trainer["val_check_interval"] == 1000 * trainer["accumulate_grad_batches"]


EXPERIMENTS = sorted((ROOT / "configs/experiments").glob("*.yaml"))


def runs_of(path: Path) -> list[tuple[str, list[str]]]:
    """Return the program and the arguments of `fit` for each model of an experiment."""
    program = re.search(r"command:  python -m (\w+) compare --experiment configs/experiments/(\S+)", path.read_text())
    assert program[2] == path.name
    experiment = read_experiment(str(path), {"val/loss": "min"})
    assert set(experiment.paper) <= set(experiment.models) and "hardware:" in path.read_text()
    common = ["--config", experiment.config, *experiment.arguments]
    return [(program[1], [*common, *arguments]) for arguments in experiment.models.values()]


@pytest.mark.slow
@pytest.mark.parametrize("path", EXPERIMENTS, ids=name)
def test_runs_of_experiment_have_distinct_configurations(path, capsys, monkeypatch):
    """The command line accepts the arguments of every run, and all configurations are distinct."""
    monkeypatch.chdir(ROOT)
    parsed = set()
    for program, args in runs_of(path):
        with pytest.raises(SystemExit) as exit_info:
            MAINS[program](["fit", *args, "--print_config"])
        captured = capsys.readouterr()
        assert not exit_info.value.code, captured.err
        parsed.add(captured.out)
    assert len(parsed) == len(runs_of(path))


@pytest.mark.slow
@pytest.mark.parametrize("path", EXPERIMENTS, ids=name)
def test_last_model_of_experiment_is_planned(path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    program, args = runs_of(path)[-1]
    MAINS[program](["plan", *args, "--trainer.devices=8"])
    assert "\nmesh " in capsys.readouterr().out
