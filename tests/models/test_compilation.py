"""--compile: one graph for all layers of a kind, without a break, and the numbers of the layers as they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from fairseq.nan_detector import NanDetector
from torch._dynamo.utils import counters

from fairseq_fastweights.mixers.registry import MIXERS
from fairseq_fastweights.models import cuda_graphs, mixer_layers
from tests.conftest import DEVICE, train
from tests.models import translation
from tests.tasks.conftest import losses, train_in_two

FOUR = "--decoder-layers 4 --no-token-positional-embeddings --dropout 0 --compile"


@pytest.fixture
def compiler(monkeypatch):
    """`compiler(backend)` compiles with it from then on; the list that it returns grows by each graph."""

    def use(backend):
        torch.compiler.reset()
        counters.clear()
        made = []

        def compile_graph(graph, examples):
            made.append(graph)
            return torch._dynamo.lookup_backend(backend)(graph, examples)

        compiled = torch.compile(mixer_layers._run_with_states, backend=compile_graph)
        monkeypatch.setattr(mixer_layers, "_compiled", lambda: compiled)
        return made

    yield use
    torch.compiler.reset()


def gradients(model, *inputs, **options):
    model.zero_grad()
    torch.manual_seed(5)
    out = model(*inputs, **options)[0]
    out.square().mean().backward()
    return {"out": out.detach(), **{name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}}


def assert_agree(found, wanted):
    """But for rounding: layers that are compiled read rows in another order."""
    for name in wanted:
        error, size = (found[name] - wanted[name]).norm(), wanted[name].norm()
        assert float(error) < 1e-5 * max(float(size), 1e-3), name  # some are zero but for rounding


def without_compilation(model):
    for layer in model.modules():
        if isinstance(layer, mixer_layers.MixerLayer):
            layer.compiles = False
    return model


@pytest.mark.parametrize("mixers", [*MIXERS, "delta:1-3,softmax:4"])
def test_a_graph_for_all_layers_of_a_kind(fairseq, text, compiler, mixers):
    model = fairseq.build(f"--mixers {mixers} {FOUR}").train()
    made, tokens = compiler("eager"), text(3, 9)
    for _ in range(2):
        found = gradients(model, tokens)
    assert len(made) == len(set(model.decoder.mixer_names)), "a graph for some layers alone"
    assert not counters["graph_break"]
    for length in (8, 7):  # as at the end of an epoch: one graph more, for all lengths
        gradients(model, text(3, length))
    assert len(made) == 2 * len(set(model.decoder.mixer_names)) and not counters["graph_break"]
    assert_agree(found, gradients(without_compilation(model), tokens))


@pytest.mark.parametrize("flags", ["", "--checkpoint-activations"])
def test_carried_states_documents_and_padding(fairseq, text, compiler, flags):
    model = fairseq.build(f"--update-rule delta {FOUR} {flags}").train()
    batches = [{"continues": torch.tensor([False] * 3)}, {"continues": torch.tensor([True, False, True])}]
    batches += [{}, {"starts": torch.zeros(3, 9, dtype=torch.bool).index_fill(1, torch.tensor([4]), True)}]
    padded = text(3, 9)
    padded[1, 6:] = 1
    results = {}
    for compiled in (True, False):
        if not compiled:
            without_compilation(model)
        made = compiler("aot_eager")
        results[compiled] = [gradients(model, text(3, 9), **batch) for batch in (*batches, *batches)]
        results[compiled].append(gradients(model, padded))
        # With states or without, documents, padding; with checkpoints also without gradients. Not for each layer.
        # Functions compiled before in the process decide which sizes are general at once; else some come twice.
        most = 24 if flags else 14
        assert 4 <= len(made) <= most if compiled else not made, len(made)
        model.decoder._carried = {True: {}, False: {}}
    assert not counters["graph_break"]
    for found, wanted in zip(*results.values(), strict=True):
        assert_agree(found, wanted)


def test_evaluation_is_not_compiled(fairseq, text, compiler):
    made = compiler("eager")
    model = fairseq.build(f"--update-rule delta {FOUR}")
    model(text(2, 5))
    assert not made


def test_who_looks_for_nan_is_told_the_module(fairseq, text, compiler, caplog):
    model = fairseq.build(f"--update-rule delta {FOUR}").train()
    made = compiler("eager")
    model(text(2, 5))
    with torch.no_grad():
        model.decoder.layers[1].fc1.weight[0, 0] = float("nan")
    with NanDetector(model, backward=False):
        model(text(2, 5))
    assert len(made) == 1 and "NaN detected in output of decoder.layers.1.fc1," in caplog.text


@pytest.mark.parametrize("alone", [False, True])
def test_translation(compiler, caplog, alone):
    options = {"fast_weight_attention": "encoder,decoder,cross", "compile": True, "no_cuda_graphs": alone}
    caplog.set_level("INFO", cuda_graphs.__name__)
    model = translation.build(**options, dropout=0.0).train()
    source, target = torch.randint(4, 20, (2, 7)), torch.randint(4, 20, (2, 5))
    batch = {"src_tokens": source, "src_lengths": torch.tensor([7, 7]), "prev_output_tokens": target}
    made = compiler("eager")
    for _ in range(2):
        found = gradients(model, **batch)
    assert caplog.text.count("not replayed as CUDA graphs: batches of translations have many shapes") == (not alone)
    assert len(made) == 2  # the encoder's, the decoder's
    assert not counters["graph_break"]
    assert_agree(found, gradients(without_compilation(model), **batch))


@pytest.mark.slow
def test_compiled_for_this_machine(fairseq, text):
    torch.compiler.reset()
    model = fairseq.build("--update-rule delta --no-token-positional-embeddings --dropout 0 --compile").train()
    found = gradients(model, text(3, 9))
    assert_agree(found, gradients(without_compilation(model), text(3, 9)))


@pytest.fixture
def quickly(monkeypatch):
    """Compiles in the quickest way, for tests that do not depend on the kernels."""
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(mixer_layers._run_with_states, backend="aot_eager")
    monkeypatch.setattr(mixer_layers, "_compiled", lambda: compiled)
    yield
    torch.compiler.reset()


TRAININGS = {
    "fp16, several batches": "--fp16 --fp16-init-scale 4 --update-freq 2",
    "bf16, carried states": "--bf16 --carry-over-state --no-token-positional-embeddings",
    "checkpointed, documents": "--checkpoint-activations --separate-documents --no-token-positional-embeddings",
}


@pytest.mark.parametrize("case", TRAININGS)
def test_a_training(case, quickly, our_fairseq, corpus: Path, tmp_path: Path):
    flags = ["--max-update", "4", *TRAININGS[case].split()]
    logs = [train(corpus, tmp_path / f"{len(extra)}", *flags, *extra) for extra in ([], ["--compile"])]
    assert counters["stats"]["unique_graphs"] and not counters["graph_break"]
    assert [log.count("not replayed as CUDA graphs: ") for log in logs] == [0, int(DEVICE == ["--cpu"])]
    assert losses(logs[1]) == pytest.approx(losses(logs[0]), abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["legacy_ddp", "pytorch_ddp", "fully_sharded --min-params-to-wrap 1000"])
def test_a_training_in_two_processes(backend, our_fairseq, corpus: Path, tmp_path: Path, monkeypatch):
    def compile_graph(graph, examples):
        (tmp_path / f"compiled by {os.getpid()}").touch()
        return graph

    compiled = torch.compile(mixer_layers._run_with_states, backend=compile_graph)
    monkeypatch.setattr(mixer_layers, "_compiled", lambda: compiled)
    flags = f"--max-update 6 --disable-validation --lr 0.01 --ddp-backend {backend}".split()
    logs = [train_in_two(corpus, tmp_path / f"{len(extra)}", *flags, *extra) for extra in ([], ["--compile"])]
    assert losses(logs[1]) == pytest.approx(losses(logs[0]), abs=2e-3)
    assert len(list(tmp_path.glob("compiled by *"))) == 2


@pytest.mark.slow
def test_losses_of_two_hundred_updates(our_fairseq, corpus: Path, tmp_path: Path):
    torch.compiler.reset()
    flags = "--max-update 200 --lr 0.001 --no-save".split()
    logs = [train(corpus, tmp_path, *flags, *extra) for extra in ([], ["--compile"])]
    torch.compiler.reset()
    found, wanted = (losses(log) for log in logs)
    assert len(found) == 200 and found == pytest.approx(wanted, abs=5e-3) and min(found) < wanted[0] - 1
