"""Several processes on CPUs, with whole models and with one that they share, against one process."""

import json
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq import trainer as fairseq_trainer
from fairseq.distributed import fully_sharded_data_parallel
from faults import trained

from tests.conftest import QUIET, ROOT, SMALL_MODEL, TASK, evaluate, train
from tests.tasks.conftest import losses, slow, train_in_two, train_translation, weights

# The batches of one process are those of several only where all read streams.
FLAGS = """--no-token-positional-embeddings --carry-over-state --lr 0.001 --max-update 6 --clip-norm 0.5
    --disable-validation --no-epoch-checkpoints""".split()
SHARDED = "--ddp-backend fully_sharded --min-params-to-wrap 1000".split()  # every layer is a group, and the rest


def run(data: Path, folder: Path, processes: int, *flags: str, **options: Any) -> str:
    batch = ["--batch-size", str(8 // processes)]
    return train_in_two(data, folder, *FLAGS, *SHARDED, *batch, *flags, processes=processes, **options)


def optimizer_of(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "checkpoint_last.pt", weights_only=False)["last_optimizer_state"]


def check_same(folder: Path, other: Path, tolerance: float = 1e-5) -> None:
    """The same names, shapes and types in two last checkpoints, and the same numbers within a tolerance."""
    one, two = (weights(x / "checkpoint_last.pt") for x in (folder, other))
    assert list(one) == list(two)
    for name, x in one.items():
        torch.testing.assert_close(
            two[name], x, rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )
    before, after = map(optimizer_of, (folder, other))
    assert before.keys() == after.keys() and before["state"].keys() == after["state"].keys()
    torch.testing.assert_close(after["state"], before["state"], rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def one(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, str]]:
    """`one(*flags)`: the folder and the log of a training in one process, with the whole model."""
    known: dict[tuple[str, ...], tuple[Path, str]] = {}

    def trained(*flags: str) -> tuple[Path, str]:
        if flags not in known:
            folder = tmp_path_factory.mktemp("one")
            known[flags] = folder, train(corpus, folder, *FLAGS, "--batch-size", "8", *flags)
        return known[flags]

    return trained


def note_bytes(folder: Path) -> None:
    """Lets the trainer write down, for a checkpoint, how much memory its parameters and its optimizer's state take."""
    original = fairseq_trainer.Trainer.state_dict

    def state_dict(self: Any) -> Any:
        parameters = [getattr(x, "_local_tensor", x) for x in self.get_model().parameters()]
        state = [x for values in self.optimizer.optimizer.state.values() for x in values.values()]
        held = [
            sum(x.untyped_storage().nbytes() for x in tensors if isinstance(x, torch.Tensor))
            for tensors in (parameters, state)
        ]
        (folder / f"{self.data_parallel_rank}.bytes").write_text(json.dumps(held))
        return original(self)

    fairseq_trainer.Trainer.state_dict = state_dict


@pytest.mark.parametrize("processes", [2, slow(4)])
def test_processes_that_share_a_model_are_one_that_has_it(processes, our_fairseq, corpus, one, tmp_path):
    whole, log = one()
    sharded = run(corpus, tmp_path, processes, prepare=lambda: note_bytes(tmp_path))
    # Of three decimals; sums of float32 in another order differ in the seventh digit.
    for name in ("loss", "gnorm"):
        assert losses(sharded, name) == pytest.approx(losses(log, name), abs=2e-3)
    check_same(whole, tmp_path)
    assert evaluate(corpus, tmp_path / "checkpoint_last.pt") == pytest.approx(
        evaluate(corpus, whole / "checkpoint_last.pt"), abs=1e-4
    )
    # Of Adam's two averages; a row more than its part where the number of rows is not a multiple of the processes.
    averages = [x for values in optimizer_of(whole)["state"].values() for x in values.values() if torch.is_tensor(x)]
    share = sum(x.nbytes for x in averages) / processes
    for rank in range(processes):
        parameters, state = json.loads((tmp_path / f"{rank}.bytes").read_text())
        assert (parameters, state) == (pytest.approx(share / 2, rel=0.05), pytest.approx(share, rel=0.05))


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 4)])
def test_another_number_of_processes_goes_on(before, after, our_fairseq, corpus, one, tmp_path):
    whole, log = one()
    first = run(corpus, tmp_path, before, "--max-update", "3")
    second = run(corpus, tmp_path, after)
    assert len(losses(second)) == 3
    assert losses(first) + losses(second) == pytest.approx(losses(log), abs=2e-3)
    check_same(whole, tmp_path)


CASES = {
    "updates of two batches, activations computed twice": ("--update-freq 2 --checkpoint-activations", 1e-5),
    "layers left out": ("--decoder-layerdrop 0.5", 1e-5),
    "adaptive softmax, tied, with biases": (
        "--adaptive-input --adaptive-input-cutoff 20 --adaptive-softmax-cutoff 20 --adaptive-input-factor 1"
        " --adaptive-softmax-factor 1 --tie-adaptive-weights --adaptive-softmax-bias --square-projections none"
        " --criterion adaptive_loss --ddp-backend legacy_ddp",
        1e-5,
    ),
    "adaptive softmax": ("--adaptive-softmax-cutoff 20 --criterion adaptive_loss --ddp-backend legacy_ddp", 1e-5),
    # Gradients are rounded to 8 and to 11 bits before they are added up, and Adam's first steps take their signs.
    "bf16": ("--bf16", 1e-2),
    "fp16": ("--fp16 --fp16-no-flatten-grads --fp16-init-scale 4", 2e-3),
    "weights in bf16": ("--memory-efficient-bf16", 1e-2),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_options_do_the_same_as_in_one_process(case, our_fairseq, corpus, one, tmp_path):
    flags, tolerance = CASES[case]
    whole, log = one(*flags.split())
    sharded = run(corpus, tmp_path, 2, *flags.split(), *SHARDED)
    assert losses(sharded) == pytest.approx(losses(log), rel=max(2e-3 / 6, tolerance))
    check_same(whole, tmp_path, tolerance)


@pytest.mark.slow
def test_weights_are_transferred_and_frozen(our_fairseq, corpus, one, tmp_path):
    source = tmp_path / "source"
    train(corpus, source, *"--mixers softmax --no-token-positional-embeddings --max-update 2".split())
    shutil.copy(corpus / "dict.txt", source)
    flags = f"--transfer-from {source}/checkpoint_last.pt --freeze embeddings --max-update 3".split()
    whole, log = one(*flags)
    sharded = run(corpus, tmp_path, 2, *flags)
    assert losses(sharded) == pytest.approx(losses(log), abs=2e-3)
    check_same(whole, tmp_path)
    name = "decoder.embed_tokens.weight"
    assert torch.equal(weights(tmp_path / "checkpoint_last.pt")[name], weights(source / "checkpoint_last.pt")[name])


@pytest.mark.slow
def test_a_trained_translator_whose_embeddings_are_shared_gets_memories(our_fairseq, pairs, tmp_path):
    data, flags = pairs.parent / "joined", "--share-all-embeddings --clip-norm 0.5 --no-epoch-checkpoints".split()
    train_translation(data, tmp_path / "source", *flags, "--arch", "transformer_tiny")
    flags += ["--finetune-from-model", str(tmp_path / "source" / "checkpoint_last.pt"), "--max-tokens", "80"]
    # Two processes read alternate batches of the one.
    log = train_translation(data, tmp_path / "one", *flags, "--update-freq", "2")
    sharded = train_translation(data, tmp_path / "two", *flags, *SHARDED, processes=2)
    for name in ("loss", "gnorm"):
        assert losses(sharded, name) == pytest.approx(losses(log, name), abs=2e-3)
    check_same(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ({"amp": True}, "--amp is set; with --ddp-backend fully_sharded it must not be"),
        ({"cpu_offload": True}, "--cpu-offload is set"),
        ({"use_sharded_state": True}, "--use-sharded-state is set"),
        ({"zero_sharding": "os"}, "--zero-sharding is set"),
        ({"store_ema": True}, "--store-ema is set"),
        ({"eval_bleu": True}, "--eval-bleu is set"),
        ({"fp16": True}, "--fp16-no-flatten-grads must be set too"),
    ],
)
def test_options_that_sharding_does_not_support_are_refused(flags, complaint, our_fairseq):
    names = "amp cpu_offload use_sharded_state store_ema eval_bleu fp16 memory_efficient_fp16 fp16_no_flatten_grads"
    options = Namespace(**(dict.fromkeys(names.split(), False) | {"zero_sharding": "none"} | flags))
    cfg = Namespace(common=options, distributed_training=options, ema=options, task=options)
    with pytest.raises(ValueError, match=complaint):
        fully_sharded_data_parallel.check_options(cfg)


STREAMS = """--no-token-positional-embeddings --carry-over-state --tokens-per-sample 16 --lr 0.001 --max-update 6
    --disable-validation --optimizer adam""".split()


@pytest.mark.slow
def test_two_processes_are_one_with_the_same_batches(our_fairseq, corpus, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [str(Path(sys.executable).with_name("fairseq-train")), str(corpus), *TASK, *SMALL_MODEL, *QUIET, *STREAMS]
    result = subprocess.run(
        [*torchrun, *command, "--batch-size", "4", "--save-dir", str(tmp_path / "two")],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stderr
    log = train(corpus, tmp_path / "one", *STREAMS, "--batch-size", "8")
    # Of three decimals; sums of float32 in another order differ in the seventh digit.
    assert losses(result.stdout) == pytest.approx(losses(log), abs=2e-3)
    one, two = (trained(tmp_path / name)["model"] for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, x in one.items():
        assert torch.allclose(x, two[name], atol=1e-5), name


def test_who_asks_for_processes_without_starting_them_is_told_how(our_fairseq, corpus, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("fairseq starts a process for each GPU")
    with pytest.raises(SystemExit, match=r"distributed_world_size is 2.*torchrun --nproc_per_node 2"):
        train(corpus, tmp_path, "--distributed-world-size", "2")
