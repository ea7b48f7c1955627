"""FSDP2: meshes, precision and gradient accumulation; rejection of other strategies."""

import json
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dctrain.checkpointing.checkpoint import load_checkpoint, newest_checkpoint
from tests.dctrain.commands import record
from tests.dctrain.commands import spawn as spawn_python
from tests.dctrain.recorder import losses

from .commands import run, small, spawn

TWO = ["--trainer.devices=2", "--data.batch_size=2"]
FSDP2 = ["--trainer.strategy=fsdp2", *TWO]
EXACT = "--trainer.callbacks+=tests.dctrain.recorder.InFloat64"
SHARDS = ["--trainer.callbacks+=tests.dctrain.recorder.ShardRecorder"]
FEW = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=4", "--trainer.limit_val_batches=1"]


def weights(folder) -> dict[str, torch.Tensor]:
    return load_checkpoint(newest_checkpoint(folder))["state_dict"]


def validated(folder) -> dict[str, float]:
    """Return the metrics of the last validation of a run, keyed by name."""
    (events,) = folder.rglob("events.out.tfevents.*")
    curves = EventAccumulator(str(events)).Reload()
    return {tag: curves.Scalars(tag)[-1].value for tag in curves.Tags()["scalars"] if tag.startswith("val/")}


def assert_four_took_the_steps_of_one(folder) -> None:
    """Compare losses, final weights and last validation of the runs `one` (one process) and `four` (four processes)."""
    assert losses(folder / "four", 4) == pytest.approx(losses(folder / "one", 1), rel=1e-10)
    got = weights(folder / "four")
    for key, value in weights(folder / "one").items():
        torch.testing.assert_close(got[key], value, rtol=1e-8, atol=1e-10, msg=key)
    expected = validated(folder / "one")
    assert {"val/loss", "val/accuracy"} <= expected.keys()
    assert validated(folder / "four") == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_gradients_are_reduced_once_per_step(corpus, tmp_path):
    """With two batches per step, the losses match one process, and nothing is reduced after the first batch."""
    accumulated = [*FEW, "--trainer.accumulate_grad_batches=2", EXACT]
    run("fit", *small(corpus, tmp_path / "one"), *accumulated, *record(tmp_path / "one"))
    shards = [
        "--trainer.callbacks+=tests.dctrain.recorder.ShardRecorder",
        f"--trainer.callbacks.file={tmp_path}/shards",
    ]
    both = spawn("fit", *small(corpus, tmp_path / "two"), *accumulated, *FSDP2, *shards, *record(tmp_path / "two"))
    assert both.returncode == 0, both.stderr
    assert losses(tmp_path / "two", 2) == pytest.approx(losses(tmp_path / "one", 1), rel=1e-10)
    with open(f"{tmp_path}/shards-rank0") as lines:
        assert [json.loads(line)["has_gradients"] for line in lines] == [False, True] * 2


@pytest.mark.long
def test_parameters_are_gathered_in_bfloat16(corpus, tmp_path):
    """Under bf16-mixed, parameters are gathered in bfloat16, and shards and checkpoints stay in float32.

    The losses match those of DDP up to rounding.
    """
    half = [*small(corpus, tmp_path), *FEW, "--trainer.precision=bf16-mixed"]
    shards = [
        "--trainer.callbacks+=tests.dctrain.recorder.ShardRecorder",
        f"--trainer.callbacks.file={tmp_path}/shards",
    ]
    for name, strategy, extra in (("ddp", ["--trainer.strategy=ddp", *TWO], []), ("fsdp2", FSDP2, shards)):
        done = spawn("fit", *half, f"--name={name}", *strategy, *extra, *record(tmp_path / name))
        assert done.returncode == 0, done.stderr
    with open(f"{tmp_path}/shards-rank1") as lines:
        assert [json.loads(line)["gathered"] for line in lines] == [["torch.bfloat16"]] * 4
    assert losses(tmp_path / "fsdp2", 2) == pytest.approx(losses(tmp_path / "ddp", 2), rel=5e-3)
    assert {tensor.dtype for tensor in weights(tmp_path / "fsdp2").values()} == {torch.float32}


@pytest.mark.parametrize(
    "model",
    [pytest.param("dcformer_pp_debug", marks=pytest.mark.slow), pytest.param("dcpythia_debug", marks=pytest.mark.long)],
)
def test_sharded_initialization_equals_that_of_one_process(corpus, tmp_path, model):
    """Weights are bitwise equal although no process stores the full model; a learning rate of 0 keeps them constant."""
    still = [f"--model.model={model}", "--model.lr=0", "--trainer.max_epochs=1", "--trainer.limit_train_batches=1"]
    run("fit", *small(corpus, tmp_path / "one"), *still)
    both = spawn("fit", *small(corpus, tmp_path / "two"), *still, *FSDP2)
    assert both.returncode == 0, both.stderr
    drawn, expected = weights(tmp_path / "two"), weights(tmp_path / "one")
    assert drawn.keys() == expected.keys()
    assert all(torch.equal(drawn[key], value) for key, value in expected.items())


@pytest.mark.long
def test_memory_of_a_rank_grows_with_its_shards():
    """From two to eight layers, peak memory grows by less than 1.3 times the growth of the shards."""
    script = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "tests/dctrain/host_memory.py")
    few, many = (json.loads(spawn_python(layers, prefix=script).stdout) for layers in ("2", "8"))
    assert many["most"] - few["most"] < 1.3 * (many["shard"] - few["shard"])


@pytest.mark.long
def test_replicas_of_shards_match_one_process(corpus, tmp_path):
    """Four processes, with two replicas of two shards each, match one process."""
    exact = [*FEW, "--trainer.callbacks+=tests.dctrain.recorder.InFloat64"]
    run("fit", *small(corpus, tmp_path / "one"), *exact, *record(tmp_path / "one"))
    mesh = ["--trainer.strategy=FSDP2Strategy", "--trainer.strategy.replicas=2", "--trainer.devices=4"]
    four = spawn(
        "fit", *small(corpus, tmp_path / "four"), *exact, *mesh, "--data.batch_size=1", *record(tmp_path / "four")
    )
    assert four.returncode == 0, four.stderr
    assert_four_took_the_steps_of_one(tmp_path)


@pytest.mark.long
def test_two_nodes_of_two_processes_match_one_process(corpus, tmp_path):
    """Four processes that torchrun starts on two nodes match one process."""
    run("fit", *small(corpus, tmp_path / "one"), *FEW, EXACT, *record(tmp_path / "one"))
    nodes = [
        "--trainer.num_nodes=2",
        "--trainer.devices=2",
        "--trainer.strategy=fsdp2",
        "--data.batch_size=1",
        *FEW,
        EXACT,
    ]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = ["--master_addr=127.0.0.1", f"--master_port={free.getsockname()[1]}"]
    torchrun = ["torch.distributed.run", "--nnodes=2", "--nproc_per_node=2", *address]
    commands = [
        partial(spawn_python, prefix=("-m", *torchrun, f"--node_rank={rank}", "-m", "dclm", "fit")) for rank in range(2)
    ]
    with ThreadPoolExecutor() as threads:
        arguments = [*small(corpus, tmp_path / "four"), *nodes, *record(tmp_path / "four")]
        done = list(threads.map(lambda command: command(*arguments), commands))
    assert [node.returncode for node in done] == [0, 0], done[0].stderr + done[1].stderr
    assert losses(tmp_path / "four", 4) == pytest.approx(losses(tmp_path / "one", 1), rel=1e-10)


@pytest.mark.slow
def test_killed_rank_is_reported_and_checkpoint_is_kept(corpus, tmp_path):
    killed = record(tmp_path / "a", signum=int(signal.SIGKILL), at=5, rank=1)
    done = spawn("fit", *small(corpus, tmp_path), *FSDP2, "--checkpoint_every_n_steps=2", *killed)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: another process of this run has died")
    assert "Traceback" not in done.stderr
    assert load_checkpoint(newest_checkpoint(tmp_path), with_optimizer=True)["global_step"] == 4


NOT_SUPPORTED = "is not supported; expected auto, ddp, fsdp2, or, with options, FSDP2Strategy."


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (["fsdp"], f"trainer.strategy fsdp {NOT_SUPPORTED}"),
        (["ModelParallelStrategy", "--trainer.strategy.tensor_parallel_size=1"], NOT_SUPPORTED),
        (["FSDP2Strategy", "--trainer.strategy.replicas=2"], "replicas=2 must be a divisor of the 1 ranks"),
        (["FSDP2Strategy", "--trainer.strategy.replicas=0"], "replicas=0 must be a divisor of the 1 ranks"),
    ],
    ids=str,
)
def test_unsupported_strategies_are_rejected(corpus, tmp_path, capsys, strategy, message):
    with pytest.raises(SystemExit) as exit_info:
        run("fit", *small(corpus, tmp_path), f"--trainer.strategy={strategy[0]}", *strategy[1:])
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err
