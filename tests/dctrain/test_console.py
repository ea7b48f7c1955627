"""Console output of a run: size, progress and final status, without advertisements or meaningless lines."""

import re
import subprocess
import sys
from importlib import import_module

import pytest

from dctrain.cli.entry_points import help_path
from dctrain.cli.subcommands import import_function
from tests.dcvision.commands import run, small


def test_run_prints_size_and_progress_without_noise(shards, tmp_path, capsys):
    arguments = [one for one in small(shards, tmp_path) if "progress_bar" not in one and "model_summary" not in one]
    run("fit", *arguments, "--trainer.max_epochs=-1", "--trainer.max_steps=3", "--model.warmup_steps=500")
    out, err = capsys.readouterr()
    assert "warm-up of 500 steps shortened to 0: the run has 3 steps" in out
    size = r"model dcvit_digits_patch2_8: [\d,]+ parameters, [\d,]+ FLOPs in the forward pass of one image\n"
    assert re.search(size, out)
    assert "Epoch 0" in out + err and "train/loss" in out + err
    for noise in ("v_num", "litlogger", "/-2", "Total FLOPs", "fatal:"):
        assert noise not in out + err, noise


def test_warmup_that_fits_prints_no_message(shards, tmp_path, capsys):
    run("fit", *small(shards, tmp_path), "--trainer.max_epochs=-1", "--trainer.max_steps=3", "--model.warmup_steps=2")
    assert "warm-up" not in capsys.readouterr().out


def test_resumed_run_without_remaining_steps_prints_message(shards, tmp_path, capsys):
    fit = ["fit", *small(shards, tmp_path), "--trainer.max_epochs=-1", "--trainer.max_steps=2", "--resume=latest"]
    run(*fit)
    assert "nothing was trained" not in capsys.readouterr().out
    run(*fit)
    assert "nothing was trained: the run had already finished at step 2" in capsys.readouterr().out


@pytest.mark.parametrize("program", ["dcvision", "dclm", "dcvl"])
def test_help_lists_all_subcommands(program, capsys):
    module = import_module(f"{program}.cli")
    module.main(["--help"])
    listed = re.findall(r"^    (\w+)(?:  |$)", capsys.readouterr().out, re.MULTILINE)
    cli = import_function(module.PROGRAM.trainer)
    assert sorted(listed) == sorted(["plan", *cli.subcommands(), *module.PROGRAM.functions])


@pytest.mark.parametrize("program", ["dcvision", "dclm", "dcvl"])
def test_stored_help_equals_help_of_parser(program, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    import_module(f"{program}.cli").main(["--help"])
    command = f"COLUMNS=100 python -c 'from {program}.cli import main; main([\"--help\"])' > {program}/help.txt"
    assert capsys.readouterr().out == help_path(program).read_text(), f"write it again: {command}"


@pytest.mark.parametrize("program", ["dcvision", "dclm", "dcvl"])
def test_script_help_imports_no_library(program):
    code = f"import sys; sys.argv = [{program!r}, '--help']; from dctrain.cli import entry_points; "
    code += f"entry_points.{program}(); print(sorted({{'torch', 'lightning', 'timm', 'numpy'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == help_path(program).read_text() + "[]\n"


def test_interrupt_during_imports_prints_one_word():
    code = "import os, signal; import dctrain.cli.entry_points as start; "
    code += "start.import_module = lambda name: os.kill(os.getpid(), signal.SIGINT); start.start('dclm')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
