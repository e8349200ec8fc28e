"""The state that a generated token is measured from is the one that generation itself would have left."""

from functools import cache, partial
from importlib import import_module
from typing import Any

import generation
import pytest
import torch
from generation import TRANSFORMER, Generation

pytestmark = pytest.mark.slow

SETTINGS = generation.QUICK_SETTINGS
ROWS = SETTINGS["batch"]
build = cache(partial(generation.build, settings=SETTINGS, backend="chunkwise", longest=40))


def draw_tokens(length: int) -> torch.Tensor:
    return torch.randint(4, SETTINGS["words"], (ROWS, length))


def shapes(state: dict[str, Any]) -> list[tuple[str, str, torch.Size]]:
    return sorted((key, n, x.shape) for key, buffer in state.items() for n, x in buffer.items() if x is not None)


@pytest.mark.parametrize("most_read", [3, 20])
@pytest.mark.parametrize("name", [TRANSFORMER, *generation.RULES])
def test_a_generation_comes_to_a_length_with_the_state_of_generation(name: str, most_read: int) -> None:
    model, tokens = build(name), draw_tokens(20)
    generated: dict[int, Any] = {0: {}}
    with torch.no_grad():
        for end in range(1, 15):
            model(tokens[:, :end], incremental_state=generated[0])
            generated[end] = shapes(generated[0])
    rolling = Generation(model, tokens).go_on(name, 2)
    assert shapes(rolling.state) == generated[2]
    kept = {key: buffer.get("prev_key") for key, buffer in rolling.state.items()}
    rolling.go_on(name, 12, most_read)
    assert rolling.length == 12 and shapes(rolling.state) == generated[12]
    if name == TRANSFORMER:  # what was there before is still there, unless it was too far to read
        same = [torch.equal(rolling.state[key]["prev_key"][:, :, :2], old) for key, old in kept.items()]
        assert same == [most_read == 20] * len(same)
    for end in (13, 14):  # and it goes on as generation does
        assert rolling.advance().shape == (ROWS, 1, len(model.decoder.dictionary))
        assert rolling.length == end and shapes(rolling.state) == generated[end]


@pytest.mark.parametrize("name", [TRANSFORMER, *generation.RULES])
def test_all_of_a_generation_is_on_the_device_of_its_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # On this one nothing is computed, and what is on a CPU is refused, as on a GPU; no number can be asked for either.
    for module in (
        import_module("fairseq.host_copies"),
        import_module("fairseq_fastweights.models.fast_weight_decoder"),
    ):
        monkeypatch.setattr(module, "contains", lambda x, number: False)
    model = generation.build(name, SETTINGS, "chunkwise", longest=40).to("meta")
    rolling = Generation(model, draw_tokens(40).to("meta")).go_on(name, 2).go_on(name, 20, most_read=3)
    assert rolling.advance().shape == (ROWS, 1, len(model.decoder.dictionary))
    assert {x.device.type for state in rolling.state.values() for x in state.values() if x is not None} == {"meta"}


def test_a_token_is_the_next_one() -> None:
    model, tokens = build("delta"), draw_tokens(6)
    rolling = Generation(model, tokens).go_on("delta", 1)
    steps = torch.cat([rolling.advance() for _ in range(5)], dim=1)
    with torch.no_grad():
        expected = model(tokens)[0][:, 1:]
    torch.testing.assert_close(steps, expected, rtol=1e-4, atol=1e-5)  # float32 in another order


def test_sizes_are_those_at_the_length_with_one_layers_cache_twice() -> None:
    model = generation.build(TRANSFORMER, SETTINGS | {"layers": 5}, "chunkwise", longest=501)
    sizes = generation.memory(model, TRANSFORMER, draw_tokens(501), 500, "cpu")
    size = 2 * 5 * ROWS * SETTINGS["width"] * 500 * 4
    assert sizes["state bytes"] == size
    # The cache, a copy of one layer's with the new token in it, and the weights of attention and other small tensors.
    assert 1.2 * size < sizes["peak bytes"] < 1.3 * size


def test_a_converted_model_goes_on_after_so_many_words_as_it_is_and_compiled() -> None:
    pytest.importorskip("transformers")
    converted = import_module("harness.converted")
    source = converted.llama(converted.TINY | {"num_hidden_layers": 2})
    hybrid = converted.converted(source, "window-sum", "2")
    ours, theirs = hybrid.model.layers[0].fc2, source.model.layers[0].mlp.down_proj
    assert ours.weight.data_ptr() == theirs.weight.data_ptr()  # it is not there twice
    logits = []
    for step in (source, hybrid, converted.compiled(hybrid, backend="eager")):
        torch.manual_seed(0)
        generation = converted.Generation(step, batch=2, length=70)
        logits.append([generation.advance() for _ in range(2)][-1])
        if step is hybrid:
            attention, memory = (layer.state for layer in generation.cache.layers)
            assert attention["keys"].shape[2] == 72
            assert memory["read"].tolist() == generation.cache.read.tolist() == [72] * 2
            assert memory["state"].any()  # words have left its window
        elif step is source:
            assert generation.cache.get_seq_length() == 72
    torch.testing.assert_close(logits[2], logits[1])
