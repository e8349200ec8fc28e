"""CUDA graphs: layers that are replayed train as those that are not, bit by bit; on a CPU, with graphs' stand-ins."""

from __future__ import annotations

import contextlib
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from benchmarks.harness.updates import StandInGraph, _OnGpu, stand_in_graphs
from fairseq_fastweights.mixers.registry import MIXERS
from fairseq_fastweights.models import cuda_graphs, mixer_layers
from tests.conftest import train
from tests.tasks.conftest import losses, train_in_two

PLAIN = "--no-token-positional-embeddings --dropout 0.2"
DELTA = f"--update-rule delta {PLAIN}"
CALLS = cuda_graphs.REPEATED + 3


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    """The replays that are done; two for each forward pass with its backward pass."""
    done = []

    def replay(graph):
        done.append(graph)
        original(graph)

    original = StandInGraph.replay
    monkeypatch.setattr(StandInGraph, "replay", replay)
    with stand_in_graphs():
        yield done


def updates(model, batches):
    """A model's outputs for these batches, its gradients, and its states, after an update for each."""
    results, kept = [], []
    for number, (tokens, options) in enumerate(batches):
        torch.manual_seed(number)  # as fairseq's trainer
        model.zero_grad()
        for _ in range(2):  # gradients add up, as with --update-freq
            out, extra = model(tokens, **options)
            out.float().square().mean().backward()
            states = [x for state in model.decoder.carried_states() for x in state.values()]
            kept += [(x, x.detach().clone()) for x in (*extra["inner_states"], *states, out)]
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        states = {
            f"{i} {name}": x.clone() for i, s in enumerate(model.decoder.carried_states()) for name, x in s.items()
        }
        results.append({"out": kept[-1][1], **gradients, **states})
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * (0 if p.grad is None else p.grad)
    assert all(torch.equal(out, then) for out, then in kept), "a replay has overwritten what was returned"
    return results


def same(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert torch.equal(one[name], other[name]), name


def alike(text, options=lambda number: {}):
    return [(text(3, 9, seed=number), options(number)) for number in range(CALLS)]


CONTINUES = lambda number: {"continues": torch.tensor([number > 0, number % 3 > 0, number > 0])}  # noqa: E731
STARTS = lambda number: {"starts": torch.zeros(3, 9, dtype=torch.bool).index_fill(1, torch.tensor([number]), True)}  # noqa: E731
OPTIONS = {"carried states": CONTINUES, "documents": STARTS, "both": lambda n: CONTINUES(n) | STARTS(n)}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", OPTIONS)
def test_replayed_layers_are_those_that_are_not(fairseq, text, graphs, options, precision):
    batches = alike(text, OPTIONS[options])
    models = [fairseq.build(f"{DELTA}{flag}").train().to(getattr(torch, precision)) for flag in ("", " --cuda-graphs")]
    wanted = updates(models[0], batches)
    assert not graphs
    same(updates(models[1], batches), wanted)
    # The first of a stream has no state yet, and so another form.
    assert len(graphs) == 2 * (2 * CALLS - cuda_graphs.REPEATED - ("continues" in batches[0][1]))


@pytest.mark.parametrize("mixers", MIXERS)
def test_every_mixer_is_replayed(fairseq, text, graphs, mixers):
    flags = f"--mixers {mixers} {PLAIN}"
    batches = alike(text)
    models = [fairseq.build(f"{flags}{flag}").train() for flag in ("", " --cuda-graphs")]
    same(updates(models[1], batches), updates(models[0], batches))
    assert graphs


def test_compiled_layers_are_replayed(fairseq, text, graphs, monkeypatch):
    torch.compiler.reset()
    compiled = torch.compile(mixer_layers._run_with_states, backend="eager")
    monkeypatch.setattr(mixer_layers, "_compiled", lambda: compiled)
    build = lambda flags: fairseq.build(f"{DELTA} --compile{flags}").train()  # noqa: E731
    wanted = updates(build(" --no-cuda-graphs"), alike(text))
    assert not graphs
    for flags in ("", " --cuda-graphs"):
        same(updates(build(flags), alike(text)), wanted)
        assert graphs
        del graphs[:]
    torch.compiler.reset()


# Flags and places of training that cannot be recorded, with the reason that is logged. With fairseq-hydra-train the
# model does not know the latter by its options.
NOT_RECORDED = {
    "--checkpoint-activations": "checkpoint_activations is set: what was recorded is not computed again",
    "--decoder-layerdrop 0.5": "decoder_layerdrop is 0.5: it leaves out other layers each time",
    "--feature-map favor --favor-features 4": "feature_map is favor: it draws its features by a decomposition, "
    "which may wait",
    "cpu": "the model is on cpu: a GPU replays them",
    "amp": "amp is set: it keeps copies of weights in 16 bits from call to call; bf16 and fp16 can be",
    "FSDP": "ddp_backend is fully_sharded: parameters must stay where they are, and those of fully_sharded come and go",
    "memory": "CUDA out of memory. Tried to allocate 2 GiB.",
}


def fill_memory(*arguments, **options):
    """In the place of a recording on a GPU whose memory does not suffice."""
    try:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nOf the GPU ...")
    except RuntimeError:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture") from None


@contextlib.contextmanager
def trained_in(place, monkeypatch, *models):
    """Lets models find the place of training that `NOT_RECORDED` calls `place`."""
    monkeypatch.setattr(mixer_layers, "_compiled", lambda: mixer_layers._run_with_states)  # which takes no time
    if place == "cpu":
        monkeypatch.setattr(StandInGraph, "device_type", "cuda")
    if place == "memory":
        monkeypatch.setattr(StandInGraph, "record", fill_memory)
    if place == "FSDP":
        for layer in (model.decoder.layers[0] for model in models):
            layer.__class__ = type("FSDPLayer", (type(layer),), {})  # as fully_shard does
    with torch.autocast("cpu", torch.bfloat16, enabled=place == "amp"):
        yield


@pytest.mark.parametrize("case", NOT_RECORDED)
def test_compile_goes_on_without_and_says_why(fairseq, text, graphs, monkeypatch, caplog, case):
    caplog.set_level("INFO")
    flags = f"{DELTA} --compile {case if case.startswith('--') else ''}"
    plain, model = (fairseq.build(f"{flags} {more}") for more in ("--no-cuda-graphs", ""))
    model(text(3, 9))  # an evaluation, which says nothing
    with trained_in(case, monkeypatch, plain, model):
        same(updates(model.train(), alike(text)), updates(plain.train(), alike(text)))
    assert not graphs
    said = [record.getMessage() for record in caplog.records if record.name == cuda_graphs.__name__]
    assert said == [f"compile: the layers are compiled, and not replayed as CUDA graphs: {NOT_RECORDED[case]}"]


@pytest.mark.parametrize("place", ["cpu", "amp", "FSDP", "memory"])
def test_an_impossible_request_is_refused_at_the_first_update(fairseq, text, monkeypatch, place):
    given, _, why = NOT_RECORDED[place].partition(": ")
    model = fairseq.build(f"{DELTA} --compile --cuda-graphs").train()
    with trained_in(place, monkeypatch, model), pytest.raises((ValueError, RuntimeError)) as refused:
        updates(model, alike(text))
    says = f"cuda_graphs is set, and {given}; one of them must go: {why}" if why else "CUDA error: operation failed"
    assert str(refused.value).startswith(says)


def test_layers_behind_frozen_embeddings_are_replayed(fairseq, text, graphs):
    models = [fairseq.build(f"{DELTA}{flag}").train() for flag in ("", " --cuda-graphs")]
    results = []
    for model in models:
        model.decoder.embed_tokens.requires_grad_(False)
        results.append(updates(model, alike(text)))
        model.decoder.embed_tokens.requires_grad_()  # as they are thawed: other gradients, another recording
        results[-1] += updates(model, alike(text))
    same(*results)
    assert len(graphs) == 2 * 2 * (2 * CALLS - cuda_graphs.REPEATED)


def test_inputs_of_another_form_are_not_replayed(fairseq, text, graphs):
    model = fairseq.build(f"{DELTA} --cuda-graphs").train()
    plain = fairseq.build(DELTA).train()
    padded = text(3, 9)
    padded[1, 6:] = 1
    # (tokens, whether they are replayed)
    usual, other = (text(3, 9), True), [(text(2, 9), False), (text(3, 7), False), (padded, False)]
    calls = [(text(3, 9), False)] * cuda_graphs.REPEATED
    calls += [usual, *other, usual, *other, usual, *other, usual, *other, usual]
    calls += [(text(2, 9), False)] * cuda_graphs.REPEATED + [(text(2, 9), True), (text(3, 9), False)]
    for number, (tokens, is_replayed) in enumerate(calls):
        del graphs[:]
        for each in (model, plain):
            each.zero_grad()
            torch.manual_seed(number)
            each(tokens)[0].square().mean().backward()
        assert len(graphs) == 2 * is_replayed, number
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad), (number, name)


def replaying(fairseq, text):
    """A model whose layers are replayed."""
    model = fairseq.build(f"{DELTA} --cuda-graphs").train()
    for _ in range(cuda_graphs.REPEATED + 1):
        model(text(3, 9))[0].sum().backward()
    return model


def test_weights_elsewhere_hooks_and_evaluation_are_not_replayed(fairseq, text, graphs):
    model, seen = replaying(fairseq, text), []
    assert len(graphs) == 2
    with torch.no_grad():
        model(text(3, 9))
    model.eval()(text(3, 9))
    hook = model.train().decoder.layers[1].fc1.register_forward_hook(lambda *_: seen.append(1))
    model(text(3, 9))
    hook.remove()
    assert len(graphs) == 2 and seen == [1]
    model(text(3, 9))
    assert len(graphs) == 3
    weight = model.decoder.layers[1].fc1.weight
    weight.data = weight.data.clone() * 2
    model(text(3, 9))
    assert len(graphs) == 3


def test_a_copy_of_a_model_replays_its_own_layers(fairseq, text, graphs):
    model = replaying(fairseq, text)
    copied = deepcopy(model)
    batches = alike(text)
    same(updates(copied, batches), updates(model, batches))
    assert copied.decoder._graphed._module is copied.decoder.layers


def test_results_before_their_backward_pass_are_not_overwritten(fairseq, text, graphs):
    model, plain = replaying(fairseq, text), fairseq.build(DELTA).train()
    del graphs[:]
    found = []
    for each in (model, plain):
        each.zero_grad()
        torch.manual_seed(0)
        first, second = (each(text(3, 9, seed=seed))[0].square().sum() for seed in (1, 2))
        second.backward()
        first.backward(retain_graph=True)
        found.append([p.grad.clone() for p in each.parameters()])
        if each is model:
            assert len(graphs) == 2
            with pytest.raises(RuntimeError, match="a second backward pass goes through layers that were replayed"):
                first.backward()
            model(text(3, 9))  # which nobody will go back through
            model(text(3, 9))[0].sum().backward()
            assert len(graphs) == 2 + 1 + 2
    assert all(map(torch.equal, *found))


TRAININGS = {
    "fp16, moving average": ("--compile", "--fp16 --fp16-init-scale 4 --store-ema --ema-fp32 --ema-start-update 6"),
    "bf16, carried states": (
        "--cuda-graphs",
        "--bf16 --update-freq 2 --carry-over-state --no-token-positional-embeddings",
    ),
    "documents": ("--cuda-graphs", "--no-token-positional-embeddings --separate-documents"),
}


@pytest.mark.parametrize("case", TRAININGS)
def test_a_training(case, graphs, our_fairseq, corpus: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(mixer_layers, "_compiled", lambda: mixer_layers._run_with_states)
    way, more = TRAININGS[case]
    flags = ["--dropout", "0.1", "--max-update", "8", *more.split()]
    logs = [train(corpus, tmp_path / f"{len(extra)}", *flags, *extra) for extra in ([], [way])]
    assert graphs
    assert losses(logs[0]) == losses(logs[1])


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "way"), [("legacy_ddp", "--cuda-graphs"), ("pytorch_ddp", "--compile")])
def test_a_training_in_two_processes(backend, way, our_fairseq, corpus: Path, tmp_path: Path, monkeypatch):
    def prepare():
        stand_in_graphs().__enter__()

    monkeypatch.setattr(mixer_layers, "_compiled", lambda: mixer_layers._run_with_states)

    flags = f"--max-update 8 --dropout 0.1 --disable-validation --ddp-backend {backend} --lr 0.01".split()
    logs = [train_in_two(corpus, tmp_path / f"{len(extra)}", *flags, *extra, prepare=prepare) for extra in ([], [way])]
    assert "CUDA graphs were recorded" in logs[1]
    assert losses(logs[0]) == losses(logs[1])


@pytest.mark.parametrize("mixers", MIXERS)
def test_layers_do_not_wait_for_a_gpu(fairseq, text, mixers):
    """A recording cannot wait."""
    decoder, found = fairseq.build(f"--mixers {mixers} {PLAIN}").train().decoder, []
    gpu, x = _OnGpu(found), torch.randn(9, 3, 16, requires_grad=True)
    for tensor in (x, *decoder.parameters(), *decoder.buffers()):
        gpu.note(tensor)
    with gpu:
        decoder._run_layers(x, None, None, None)[-1].sum().backward()
    assert not found
