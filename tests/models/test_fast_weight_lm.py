"""One language model, three ways to run it: whole texts, one token at a time, and segment after
segment with the state carried over. They give the same numbers, in training as in evaluation."""

from __future__ import annotations

import sys
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fairseq.sequence_generator import SequenceGenerator

from fairseq_fastweights.mixers.update_rules import UPDATE_RULES

TIME, BATCH = 12, 3

# The module's bound (float32, norm of the difference over the norm) holds for the model as well:
# layer norms keep the error of two layers from growing.
FLOAT32 = 1e-5

# Sums over all positions of terms of either sign.
FLOAT32_GRADIENT = 5e-5

ADAPTIVE = (
    "--adaptive-input --adaptive-input-cutoff 10,25 --adaptive-softmax-cutoff 10,25"
    " --adaptive-input-factor 2 --adaptive-softmax-factor 2"
)

# Beside each rule as its paper has it: every way of keeping a state, and fairseq's options that
# change what surrounds it.
RULES = {
    **{rule: f"--update-rule {rule}" for rule in UPDATE_RULES},
    "sum favor": "--update-rule sum --feature-map favor --favor-features 6",
    "delta dpfp": "--update-rule delta --feature-map dpfp --normalization sum,attention",
    "delta removal": "--update-rule delta --normalization sum,attention,removal",
    "pre-norm": "--decoder-normalize-before --no-attention-bias --scale-read-out",
    "adaptive": f"--update-rule sum {ADAPTIVE} --tie-adaptive-weights --tie-adaptive-proj",
    "retention": "--update-rule retention",
    "local": "--mixers local --local-window 3",
    "abc": "--mixers abc --abc-slots 3",
    "transformer-xl": "--mixers transformer-xl --transformer-xl-same-length",
    "mamba": "--mixers mamba --mamba-state 4",
    "gated-delta": "--mixers gated-delta --gated-delta-key-dim 6 --gated-delta-negative-eigenvalues",
    "kimi-delta": "--mixers kimi-delta --kimi-delta-conv 2",
    "delta-product": "--mixers delta-product --delta-product-writes 3",
    "two": "--mixers delta,local:2 --local-window 3",
    "small state": "--update-rule gated --feature-dim 3 --share-decoder-input-output-embed",
}
POSITIONS = {
    "sinusoidal": "",
    "learned": "--decoder-learned-pos",
    "no positions": "--no-token-positional-embeddings",
}
NO_POSITIONS = POSITIONS["no positions"]


def rules(*names: str, **others: dict[str, Any]) -> pytest.MarkDecorator:
    """Each of these rules, or of all, with one of the values of another argument in turn."""
    cases: dict[str, tuple[Any, ...]] = {name: (RULES[name],) for name in names or RULES}
    for table in others.values():
        turns = zip(cases.items(), cycle(table.items()), strict=False)
        cases = {f"{name}-{other}": (*case, value) for (name, case), (other, value) in turns}
    return pytest.mark.parametrize(("flags", *others), cases.values(), ids=list(cases))


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    scale = expected.double().norm().item() or 1.0
    return (actual.double() - expected.double()).norm().item() / scale


def token_by_token(model, tokens: torch.Tensor, incremental: dict | None = None) -> torch.Tensor:
    """As the sequence generator asks: the whole prefix every time, and a state."""
    incremental = {} if incremental is None else incremental
    steps = [model(tokens[:, : t + 1], incremental_state=incremental)[0] for t in range(tokens.shape[1])]
    assert all(step.shape[1] == 1 for step in steps)
    return torch.cat(steps, dim=1)


def in_segments(model, tokens: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    outputs, goes_on = [], False
    for segment in tokens.split(lengths, dim=1):
        rows = torch.full((len(tokens),), goes_on)
        outputs.append(model(segment, continues=rows)[0])
        goes_on = True
    return torch.cat(outputs, dim=1)


def gradients(model, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def loss_of(model, tokens: torch.Tensor, **options) -> torch.Tensor:
    logits = model(tokens[:, :-1], **options)[0]
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def assert_same_gradients(actual, expected, tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    errors = {name: relative_error(actual[name], expected[name]) for name in expected}
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not wrong, f"relative errors above {tolerance:g}: {wrong}"


# ---------------------------------------------------------------------------- the three modes


@rules(positions=POSITIONS)
@torch.no_grad()
def test_single_tokens_give_what_the_whole_text_gives(fairseq, text, flags, positions):
    model, tokens = fairseq.build(f"{flags} {positions}"), text(BATCH, TIME)
    whole, extra = model(tokens)
    assert relative_error(token_by_token(model, tokens), whole) <= FLOAT32
    assert extra["attn"] == [None] and len(extra["inner_states"]) == 3


@rules()
@torch.no_grad()
def test_segments_give_what_the_whole_text_gives(fairseq, text, flags):
    model, tokens = fairseq.build(f"{flags} {NO_POSITIONS}"), text(BATCH, TIME)
    whole = model(tokens)[0]
    for lengths in ([TIME], [5, 1, 4, 2], [1] * TIME):
        assert relative_error(in_segments(model, tokens, lengths), whole) <= FLOAT32, lengths


@pytest.mark.parametrize(("layers", "positions"), zip(["1", "2", "1,2"], POSITIONS.values(), strict=True))
@torch.no_grad()
def test_hybrids_generate_what_they_score(fairseq, text, layers, positions):
    model = fairseq.build(f"--softmax-attention-layers {layers} {positions}")
    tokens = text(BATCH, TIME)
    assert relative_error(token_by_token(model, tokens), model(tokens)[0]) <= FLOAT32


@rules(*UPDATE_RULES, "adaptive")
@torch.no_grad()
def test_segments_with_positions_start_at_position_one(fairseq, text, flags):
    """Positions are those of the segment, the state is that of the text."""
    model, tokens = fairseq.build(flags), text(BATCH, TIME)
    first, second = tokens.split([5, 7], dim=1)
    carried = in_segments(model, tokens, [5, 7])
    assert relative_error(carried[:, :5], model(first)[0]) <= FLOAT32
    assert relative_error(carried[:, 5:], model(second)[0]) > 0.01
    # What the first layer reads does not depend on the state.
    embedded = model(second, continues=torch.ones(BATCH, dtype=torch.bool))[1]["inner_states"][0]
    assert torch.equal(embedded, model(second)[1]["inner_states"][0])


@rules()
@torch.no_grad()
def test_probabilities_sum_to_one(fairseq, text, flags):
    model, tokens = fairseq.build(flags), text(BATCH, TIME)
    log_probs = model.get_normalized_probs(model(tokens), log_probs=True)
    assert log_probs.shape == (BATCH, TIME, 44)
    # Rounding of 44 terms.
    assert torch.allclose(log_probs.exp().sum(-1), torch.ones(BATCH, TIME), atol=1e-5)


@rules()
@torch.no_grad()
def test_the_state_does_not_grow(fairseq, text, flags):
    model, incremental = fairseq.build(flags), {}
    sizes = set()
    for t in range(1, 8):
        model(text(BATCH, 8)[:, :t], incremental_state=incremental)
        sizes.add(tuple(x.shape for buffer in incremental.values() for x in buffer.values()))
    assert len(sizes) == 1 and len(incremental) == 2


@rules(*UPDATE_RULES, "delta removal", positions=POSITIONS)
def test_beams_of_fairseqs_generator_have_the_scores_of_the_whole_text(fairseq, text, flags, positions):
    """Rows of the state are reordered at every step, as hypotheses overtake one another."""
    model = fairseq.build(f"{flags} {positions} --share-decoder-input-output-embed")
    dictionary = model.decoder.dictionary
    with torch.no_grad():  # less certain, so that beams do change places
        model.decoder.embed_tokens.weight.mul_(0.3)
    generator = SequenceGenerator([model], dictionary, beam_size=4, max_len_b=10, min_len=8)
    prefix = text(2, 3)
    prefix[1, 2] = dictionary.pad()
    reordered = []
    reorder = model.decoder.reorder_incremental_state_scripting

    def record(state, order):
        reordered.append(order)
        reorder(state, order)

    model.decoder.reorder_incremental_state_scripting = record
    sample = {"net_input": {"src_tokens": prefix, "src_lengths": torch.tensor([3, 2])}}
    hypotheses = generator.generate([model], sample, prefix_tokens=prefix)
    moved = [order for order in reordered if not torch.equal(order, torch.arange(len(order)))]
    assert moved, "no beam has moved, so the test shows nothing"
    for hypothesis in [h for row in hypotheses for h in row]:
        tokens = hypothesis["tokens"]
        before = torch.cat([torch.tensor([dictionary.eos()]), tokens[:-1]])[None]
        log_probs = model.get_normalized_probs(model(before), log_probs=True)[0]
        scores = log_probs[torch.arange(len(tokens)), tokens]
        assert relative_error(hypothesis["positional_scores"], scores.detach()) <= FLOAT32


# ---------------------------------------------------------- which positions depend on which


@rules()
@torch.no_grad()
def test_a_later_token_changes_no_earlier_output(fairseq, text, flags):
    model, tokens = fairseq.build(flags), text(BATCH, TIME)
    changed = tokens.clone()
    changed[:, 7:] = text(BATCH, TIME, seed=1)[:, 7:]
    out, other = model(tokens)[0], model(changed)[0]
    assert relative_error(other[:, :7], out[:, :7]) <= 1e-6  # rounding of sums that share a block
    assert relative_error(other[:, 7:], out[:, 7:]) > 0.01


@rules(positions=POSITIONS)
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_changes_nothing(fairseq, text, flags, side, positions):
    model, tokens = fairseq.build(f"{flags} {positions}"), text(BATCH, TIME)
    lengths = [TIME, 7, 1]
    padded = torch.full_like(tokens, model.decoder.dictionary.pad())
    places = [slice(0, n) if side == "right" else slice(TIME - n, TIME) for n in lengths]
    for row, place in enumerate(places):
        padded[row, place] = tokens[row, place]
    out = model(padded)[0]
    assert out.isfinite().all()
    for row, place in enumerate(places):
        alone = model(tokens[row : row + 1, place])[0][0]
        assert relative_error(out[row, place], alone) <= FLOAT32, f"row {row}"


@rules(*UPDATE_RULES)
@torch.no_grad()
def test_padding_at_a_streams_end_leaves_its_state(fairseq, text, flags):
    model, tokens = fairseq.build(f"{flags} {NO_POSITIONS}"), text(BATCH, TIME)
    padded = tokens.clone()
    padded[1, 4:6] = model.decoder.dictionary.pad()
    out = in_segments(model, padded, [6, 6])
    expected = model(padded[1:2, [0, 1, 2, 3, 6, 7, 8, 9, 10, 11]])[0]
    assert relative_error(out[1:2, 6:], expected[:, 4:]) <= FLOAT32


@pytest.mark.parametrize(
    ("name", "last"), [("sum", 0), ("delta", 1), ("adaptive", 1), ("pre-norm", 5), ("delta", TIME), ("sum", TIME + 3)]
)
@torch.no_grad()
def test_last_positions_are_the_end_of_all_positions(fairseq, text, name, last):
    model, tokens = fairseq.build(f"{RULES[name]} {NO_POSITIONS}"), text(BATCH, TIME)
    expected = model(tokens)[0][:, max(0, TIME - last) :]
    assert relative_error(model(tokens, last_positions=last)[0], expected) <= 1e-6
    # The state is that of all positions.
    model(tokens[:, :8], continues=torch.zeros(BATCH, dtype=torch.bool), last_positions=1)
    rest = model(tokens[:, 8:], continues=torch.ones(BATCH, dtype=torch.bool))[0]
    assert relative_error(rest, model(tokens)[0][:, 8:]) <= FLOAT32


@torch.no_grad()
def test_features_are_what_the_output_layer_takes(fairseq, text):
    model, tokens = fairseq.build(), text(BATCH, TIME)
    features = model(tokens, features_only=True)[0]
    assert features.shape == (BATCH, TIME, 16)
    assert torch.equal(model.decoder.output_layer(features), model(tokens)[0])
    assert torch.equal(model.extract_features(tokens)[0], features)


@pytest.mark.parametrize(
    ("flags", "longest"),
    [
        ("", 64),  # as many as --tokens-per-sample
        ("--max-target-positions 100", 100),
        ("--softmax-attention-layers 1", 64),
        (f"--softmax-attention-layers 2 {NO_POSITIONS}", 64),
        (f"--softmax-attention-layers all {NO_POSITIONS}", 64),
        (NO_POSITIONS, sys.maxsize),
    ],
)
def test_without_positions_texts_may_be_of_any_length(fairseq, flags, longest):
    assert fairseq.build(flags).max_positions() == longest


# ---------------------------------------------------------------------------- state carried over


@rules(*UPDATE_RULES, "delta removal")
@torch.no_grad()
def test_rows_that_do_not_continue_start_empty(fairseq, text, flags):
    model, tokens = fairseq.build(f"{flags} {NO_POSITIONS}"), text(BATCH, TIME)
    first, second = tokens.split([5, 7], dim=1)
    model(first, continues=torch.zeros(BATCH, dtype=torch.bool))
    out = model(second, continues=torch.tensor([True, False, True]))[0]
    whole, alone = model(tokens)[0][:, 5:], model(second)[0]
    assert relative_error(out[[0, 2]], whole[[0, 2]]) <= FLOAT32
    assert relative_error(out[1], alone[1]) <= FLOAT32


@torch.no_grad()
def test_calls_that_carry_nothing_leave_the_state_alone(fairseq, text):
    model, tokens = fairseq.build(NO_POSITIONS), text(BATCH, TIME)
    first, second = tokens.split([5, 7], dim=1)
    model(first, continues=torch.zeros(BATCH, dtype=torch.bool))
    model(text(2, 4, seed=1))
    token_by_token(model, text(1, 4, seed=2))
    out = model(second, continues=torch.ones(BATCH, dtype=torch.bool))[0]
    assert relative_error(out, model(tokens)[0][:, 5:]) <= FLOAT32


@torch.no_grad()
def test_the_first_batch_cannot_continue_what_was_not_read(fairseq, text):
    model, tokens = fairseq.build(NO_POSITIONS), text(BATCH, TIME)
    out = model(tokens, continues=torch.ones(BATCH, dtype=torch.bool))[0]
    assert relative_error(out, model(tokens)[0]) <= FLOAT32


@torch.no_grad()
def test_a_batch_of_another_size_begins_or_is_refused(fairseq, text):
    model, tokens = fairseq.build(NO_POSITIONS), text(BATCH, TIME)
    model(tokens, continues=torch.zeros(BATCH, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"continues has 2 rows, .* had 3; .*same size"):
        model(tokens[:2], continues=torch.tensor([False, True]))
    out = model(tokens[:2], continues=torch.tensor([False, False]))[0]
    assert relative_error(out, model(tokens[:2])[0]) <= FLOAT32


def test_training_and_validation_keep_their_states_apart(fairseq, text):
    """Streams are read in turns, as a validation in mid-epoch does; of other numbers of rows."""
    model = fairseq.build(f"{NO_POSITIONS} --dropout 0")
    read = {True: text(BATCH, TIME), False: text(2, TIME, seed=1)}
    expected = {training: model(tokens)[0] for training, tokens in read.items()}
    lengths = [4, 1, 7]
    start = 0
    for i, length in enumerate(lengths):
        for training, tokens in read.items():
            model.train(training)
            rows = torch.full((len(tokens),), i > 0)
            out = model(tokens[:, start : start + length], continues=rows)[0]
            whole = expected[training][:, start : start + length]
            assert relative_error(out, whole) <= FLOAT32, (i, training)
        start += length


@rules(*UPDATE_RULES, "delta removal")
def test_gradients_stop_at_the_segments_edge(fairseq, text, flags):
    model = fairseq.build(f"{flags} {NO_POSITIONS} --dropout 0").train()
    tokens = text(BATCH, TIME)
    begin, go_on = torch.zeros(BATCH, dtype=torch.bool), torch.ones(BATCH, dtype=torch.bool)

    with torch.no_grad():
        model(tokens[:, :5], continues=begin)
    expected = gradients(model, loss_of(model, tokens[:, 5:], continues=go_on))
    first = loss_of(model, tokens[:, :6], continues=begin)
    actual = gradients(model, loss_of(model, tokens[:, 5:], continues=go_on))
    assert_same_gradients(actual, expected, 1e-7)  # the same operations on the same numbers
    gradients(model, first)  # its graph is still whole: the second segment has not used it up
    # The claim is not empty: the text in one piece has other gradients.
    logits = model(tokens[:, :-1])[0][:, 5:]
    whole = F.cross_entropy(logits.flatten(0, 1), tokens[:, 6:].flatten())
    through = gradients(model, whole)["decoder.layers.0.self_attn.v_proj.weight"]
    assert relative_error(through, expected["decoder.layers.0.self_attn.v_proj.weight"]) > 0.01


# ----------------------------------------------------------------- fairseq's ways of training

TRAINED = {
    "favor": "--update-rule sum --feature-map favor",
    "delta": "--update-rule delta",
    "decay": "--update-rule decay --attention-dropout 0.2",
    "hybrid": "--softmax-attention-layers 2 --attention-dropout 0.2",
}


# Ordinary attention carries nothing over.
TRAINED_AND_CARRIED = [(name, False) for name in TRAINED]
TRAINED_AND_CARRIED += [(name, True) for name in TRAINED if name != "hybrid"]


@pytest.mark.parametrize(("name", "carried_over"), TRAINED_AND_CARRIED)
def test_checkpointed_activations_change_neither_loss_nor_gradients(fairseq, text, name, carried_over):
    flags = f"{TRAINED[name]} {NO_POSITIONS} --dropout 0.2"
    results = []
    for checkpointing in ("", "--checkpoint-activations"):
        model = fairseq.build(f"{flags} {checkpointing}").train()
        assert hasattr(model.decoder.layers[0], "precheckpoint_forward") == bool(checkpointing)
        torch.manual_seed(4)
        steps = []
        for i in range(3):
            tokens = text(BATCH, 9, seed=i)
            rows = {"continues": torch.full((BATCH,), i > 0)} if carried_over else {}
            loss = loss_of(model, tokens, **rows)
            steps.append((loss.detach(), gradients(model, loss)))
        results.append(steps)
    for (loss, grads), (same_loss, same_grads) in zip(*results, strict=True):
        # The same operations on the same numbers.
        assert relative_error(same_loss, loss) <= 1e-6
        assert_same_gradients(same_grads, grads, 1e-6)


def test_dropped_layers_pass_on_their_states(fairseq, text):
    model = fairseq.build(f"{NO_POSITIONS} --dropout 0 --decoder-layerdrop 0.5").train()
    layers, tokens = model.decoder.layers, text(BATCH, TIME)
    begin, go_on = torch.zeros(BATCH, dtype=torch.bool), torch.ones(BATCH, dtype=torch.bool)
    for p, segment, rows in ((-1, tokens[:, :4], begin), (1, tokens[:, 4:9], go_on)):
        layers.p = p  # all layers, then none of them
        model(segment, continues=rows)
    layers.p = -1
    out = model(tokens[:, 9:], continues=go_on)[0]
    assert relative_error(out, model(tokens[:, [0, 1, 2, 3, 9, 10, 11]])[0][:, 4:]) <= FLOAT32


@rules(dtype={"bfloat16": torch.bfloat16, "float16": torch.float16})
def test_half_types_are_finite_and_near_float32(fairseq, text, flags, dtype):
    model = fairseq.build(f"{flags} --dropout 0")
    low = fairseq.build(f"{flags} --dropout 0").to(dtype)
    model.load_state_dict(low.state_dict())  # the same numbers, rounded
    tokens = text(BATCH, TIME)
    begin, go_on = torch.zeros(BATCH, dtype=torch.bool), torch.ones(BATCH, dtype=torch.bool)
    for rows in (begin, go_on):
        expected, out = (m(tokens, continues=rows)[0] for m in (model, low))
        assert out.dtype == dtype
        # Some thirty roundings to 2^-9 through two layers: near 1 % where they add up at random.
        assert relative_error(out, expected) <= 0.03
    grads = gradients(low.train(), low(tokens)[0].float().square().mean())
    assert all(grad.isfinite().all() for grad in grads.values())


def test_rows_that_continue_what_was_never_seen_are_warned_of_once(fairseq, text, caplog):
    model = fairseq.build("--no-token-positional-embeddings")
    continues = torch.tensor([True, True])
    out, _ = model(text(2, 6), continues=continues)
    fresh, _ = model(text(2, 6))
    assert torch.equal(out, fresh)
    model(text(2, 6), continues=continues)
    assert sum("start empty" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("rule", ["delta", "decay"])
def test_states_that_are_carried_can_be_taken_along(fairseq, text, rule):
    """By another process: the keys under which a module finds its state are not the same there."""
    flags = f"--no-token-positional-embeddings --dropout 0 --update-rule {rule}"
    model, other = fairseq.build(flags).train(), fairseq.build(flags).train()
    other.load_state_dict(model.state_dict())
    first, second = text(2, 6), text(2, 6)
    begin, go_on = torch.tensor([False, False]), torch.tensor([True, True])
    assert other.decoder.carried_states() == []
    model(first, continues=begin)
    states = model.decoder.carried_states()
    assert len(states) == 2 and all(x.abs().sum() > 0 for layer in states for x in layer.values())
    other.decoder.restore_carried_states(states)
    assert torch.equal(other(second, continues=go_on)[0], model(second, continues=go_on)[0])
    with pytest.raises(ValueError, match="states has 1 layers; the model has 2"):
        other.decoder.restore_carried_states(states[:1])
