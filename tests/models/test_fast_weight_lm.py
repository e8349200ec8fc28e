"""Whole texts, one token at a time, and segments with the state carried over give the same numbers."""

from __future__ import annotations

import sys
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from fairseq.sequence_generator import SequenceGenerator

from fairseq_fastweights.mixers.update_rules import UPDATE_RULES
from tests.ops.agreement import assert_close, relative_error

TIME, BATCH = 12, 3
BEGIN, CONTINUE = torch.zeros(BATCH, dtype=torch.bool), torch.ones(BATCH, dtype=torch.bool)

FLOAT32 = 1e-5  # as for one module: layer norms keep the error of two layers from growing

ADAPTIVE = (
    "--adaptive-input --adaptive-input-cutoff 10,25 --adaptive-softmax-cutoff 10,25"
    " --adaptive-input-factor 2 --adaptive-softmax-factor 2 --tie-adaptive-weights --tie-adaptive-proj"
)
MODELS = {
    **{rule: f"--update-rule {rule}" for rule in UPDATE_RULES},
    "sum favor": "--update-rule sum --feature-map favor --favor-features 6",
    "delta dpfp": "--update-rule delta --feature-map dpfp --normalization sum,attention",
    "delta removal": "--update-rule delta --normalization sum,attention,removal",
    "pre-norm": "--decoder-normalize-before --no-attention-bias --scale-read-out",
    "adaptive": f"--update-rule sum {ADAPTIVE}",
    "retention": "--update-rule retention",
    "retention rms": "--update-rule retention --retention-rms-norm --retention-value-dim 6 --feature-dim 4",
    "local, abc": "--mixers local,abc:2 --local-window 3 --abc-slots 3",
    "transformer-xl": "--mixers transformer-xl --transformer-xl-same-length",
    "mamba": "--mixers mamba --mamba-state 4 --parallel-residual --decoder-normalize-before",
    "gated-delta": "--mixers gated-delta,kimi-delta:2 --gated-delta-key-dim 6 --kimi-delta-conv 2",
    "delta-net": "--mixers delta-net,gla:2 --delta-net-gate --gla-key-dim 3",
    "delta-product": "--mixers delta-product --delta-product-writes 3",
    "small state": "--update-rule gated --feature-dim 3 --share-decoder-input-output-embed",
}
CHECKPOINTED = {"sum --feature-map favor": True, "decay": True, "delta --softmax-attention-layers 2": False}
SOFTMAX = [f"--softmax-attention-layers {layers}" for layers in ("1", "2", "all")]
NO_POSITIONS = "--no-token-positional-embeddings"


def token_by_token(model, tokens: torch.Tensor) -> torch.Tensor:
    """As the sequence generator asks: the whole prefix every time, and a state, which does not grow."""
    incremental, sizes, steps = {}, set(), []
    for t in range(tokens.shape[1]):
        steps.append(model(tokens[:, : t + 1], incremental_state=incremental)[0])
        sizes.add(tuple(x.shape for buffer in incremental.values() for x in buffer.values()))
    assert all(step.shape[1] == 1 for step in steps)
    assert len(incremental) == 2 and (len(sizes) == 1 or not all(mixer.carries for mixer in model.decoder.mixers))
    return torch.cat(steps, dim=1)


def in_segments(model, tokens: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    segments = enumerate(tokens.split(lengths, dim=1))
    return torch.cat([model(x, continues=torch.full((len(tokens),), i > 0))[0] for i, x in segments], dim=1)


def gradients(model, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def loss_of(model, tokens: torch.Tensor, **options) -> torch.Tensor:
    logits = model(tokens[:, :-1], **options)[0]
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


@pytest.mark.parametrize("flags", MODELS.values(), ids=MODELS)
@torch.no_grad()
def test_tokens_and_segments_give_the_whole_texts_output(fairseq, text, flags):
    model, tokens = fairseq.build(f"{flags} {NO_POSITIONS}"), text(BATCH, TIME)
    whole, extra = model(tokens)
    assert extra["attn"] == [None] and len(extra["inner_states"]) == 3
    assert relative_error(token_by_token(model, tokens), whole) <= FLOAT32
    for lengths in ([TIME], [5, 1, 4, 2], [1] * TIME):
        assert relative_error(in_segments(model, tokens, lengths), whole) <= FLOAT32, lengths
    first, second = tokens.split([5, 7], dim=1)
    model(first, continues=BEGIN)
    out = model(second, continues=torch.tensor([True, False, True]))[0]  # the second row starts empty
    assert relative_error(out[[0, 2]], whole[[0, 2], 5:]) <= FLOAT32
    assert relative_error(out[1], model(second)[0][1]) <= FLOAT32


@pytest.mark.parametrize("flags", [*MODELS.values(), *SOFTMAX])
@torch.no_grad()
def test_neither_later_tokens_nor_padding_change_an_output(fairseq, text, flags):
    positions = ("", "--decoder-learned-pos", NO_POSITIONS)[[*MODELS.values(), *SOFTMAX].index(flags) % 3]
    model, tokens = fairseq.build(f"{flags} {positions}"), text(BATCH, TIME)
    out, pad = model(tokens)[0], model.decoder.dictionary.pad()
    assert relative_error(token_by_token(model, tokens), out) <= FLOAT32  # with positions too
    other = model(torch.cat([tokens[:, :7], text(BATCH, TIME, seed=1)[:, 7:]], dim=1))[0]
    assert relative_error(other[:, :7], out[:, :7]) <= 1e-6  # rounding of sums that share a block
    assert relative_error(other[:, 7:], out[:, 7:]) > 0.01
    for right in (True, False):
        places = [slice(0, n) if right else slice(TIME - n, TIME) for n in (TIME, 7, 1)]
        padded = torch.full_like(tokens, pad)
        for row, place in enumerate(places):
            padded[row, place] = tokens[row, place]
        out = model(padded)[0]
        assert out.isfinite().all()
        for row, place in enumerate(places):
            alone = model(tokens[row : row + 1, place])[0][0]
            assert relative_error(out[row, place], alone) <= FLOAT32, f"row {row}"


@torch.no_grad()
def test_positions_are_the_segments_and_the_state_is_the_texts(fairseq, text):
    model, tokens = fairseq.build(), text(BATCH, TIME)
    in_segments(model, tokens, [5, 7])
    carried, alone = model(tokens, continues=CONTINUE), model(tokens)
    assert relative_error(carried[0], alone[0]) > 0.01
    assert torch.equal(carried[1]["inner_states"][0], alone[1]["inner_states"][0])


@pytest.mark.parametrize("flags", ["--update-rule decay --decoder-learned-pos", "--mixers mamba,softmax:2"])
def test_beams_of_fairseqs_generator_have_the_scores_of_the_whole_text(fairseq, text, flags):
    """Rows of the state are reordered at every step, as hypotheses overtake one another."""
    model = fairseq.build(f"{flags} --share-decoder-input-output-embed")
    decoder, dictionary = model.decoder, model.decoder.dictionary
    with torch.no_grad():  # less certain, so that beams do change places
        decoder.embed_tokens.weight.mul_(0.3)
    generator = SequenceGenerator([model], dictionary, beam_size=4, max_len_b=10, min_len=8)
    prefix = text(2, 3)
    prefix[1, 2] = dictionary.pad()
    sample = {"net_input": {"src_tokens": prefix, "src_lengths": torch.tensor([3, 2])}}
    reorder = decoder.reorder_incremental_state_scripting
    with patch.object(decoder, "reorder_incremental_state_scripting", wraps=reorder) as reordered:
        hypotheses = generator.generate([model], sample, prefix_tokens=prefix)
    orders = [call.args[1] for call in reordered.call_args_list]
    assert any(not torch.equal(order, torch.arange(len(order))) for order in orders), "no beam has moved"
    for hypothesis in [h for row in hypotheses for h in row]:
        tokens = hypothesis["tokens"]
        before = torch.cat([torch.tensor([dictionary.eos()]), tokens[:-1]])[None]
        scores = model.get_normalized_probs(model(before), log_probs=True)[0, torch.arange(len(tokens)), tokens]
        assert relative_error(hypothesis["positional_scores"], scores.detach()) <= FLOAT32


@pytest.mark.parametrize(("name", "last"), [("sum", 0), ("adaptive", 1), ("pre-norm", 5), ("delta", 12), ("sum", 15)])
@torch.no_grad()
def test_last_positions_and_features_are_those_of_all_positions(fairseq, text, name, last):
    model, tokens = fairseq.build(f"{MODELS[name]} {NO_POSITIONS}"), text(BATCH, TIME)
    whole = model(tokens)[0]
    assert relative_error(model(tokens, last_positions=last)[0], whole[:, max(0, TIME - last) :]) <= 1e-6
    model(tokens[:, :8], continues=BEGIN, last_positions=1)  # the state is that of all positions
    assert relative_error(model(tokens[:, 8:], continues=CONTINUE)[0], whole[:, 8:]) <= FLOAT32
    features = model(tokens, features_only=True)[0]
    assert features.shape == (BATCH, TIME, 16) and torch.equal(model.extract_features(tokens)[0], features)
    assert torch.equal(model.decoder.output_layer(features), whole)


def test_without_positions_texts_may_be_of_any_length(fairseq):
    longest = {"": 64, "--max-target-positions 100": 100, f"--softmax-attention-layers 2 {NO_POSITIONS}": 64}
    for flags, most in {**longest, NO_POSITIONS: sys.maxsize}.items():  # 64 as --tokens-per-sample
        assert fairseq.build(flags).max_positions() == most, flags


@torch.no_grad()
def test_padding_and_other_calls_leave_a_texts_state(fairseq, text):
    """Padding at a stream's end, and calls that carry nothing."""
    model, tokens = fairseq.build(f"--update-rule decay {NO_POSITIONS}"), text(BATCH, TIME)
    whole, (first, second) = model(tokens)[0], tokens.split([6, 6], dim=1)
    padded = first.clone()
    padded[1, 4:] = model.decoder.dictionary.pad()
    model(padded, continues=BEGIN)
    model(text(2, 4, seed=1))
    token_by_token(model, text(1, 4, seed=2))
    out = model(second, continues=CONTINUE)[0]
    assert relative_error(out[[0, 2]], whole[[0, 2], 6:]) <= FLOAT32
    without = torch.cat([first[1:2, :4], second[1:2]], dim=1)
    assert relative_error(out[1:2], model(without)[0][:, 4:]) <= FLOAT32


def test_training_and_validation_keep_their_states_apart(fairseq, text):
    """Streams are read in turns, as a validation in mid-epoch does; of other numbers of rows."""
    model = fairseq.build(f"{NO_POSITIONS} --dropout 0")
    read = {True: text(BATCH, TIME), False: text(2, TIME, seed=1)}
    expected = {training: model(tokens)[0].split([4, 1, 7], dim=1) for training, tokens in read.items()}
    for i in range(3):
        for training, tokens in read.items():
            model.train(training)
            segment = tokens.split([4, 1, 7], dim=1)[i]
            out = model(segment, continues=torch.full((len(tokens),), i > 0))[0]
            assert relative_error(out, expected[training][i]) <= FLOAT32, (i, training)


@pytest.mark.parametrize("flags", [MODELS["decay"], MODELS["delta removal"]])
def test_gradients_stop_at_the_segments_edge(fairseq, text, flags):
    model, tokens = fairseq.build(f"{flags} {NO_POSITIONS} --dropout 0").train(), text(BATCH, TIME)
    with torch.no_grad():
        model(tokens[:, :5], continues=BEGIN)
    expected = gradients(model, loss_of(model, tokens[:, 5:], continues=CONTINUE))
    first = loss_of(model, tokens[:, :6], continues=BEGIN)
    actual = gradients(model, loss_of(model, tokens[:, 5:], continues=CONTINUE))
    assert_close(actual, expected, 1e-7)  # the same operations on the same numbers
    gradients(model, first)  # its graph is still whole: the second segment has not used it up
    # The claim is not empty: the text in one piece has other gradients.
    through = F.cross_entropy(model(tokens[:, :-1])[0][:, 5:].flatten(0, 1), tokens[:, 6:].flatten())
    name = "decoder.layers.0.self_attn.v_proj.weight"
    assert relative_error(gradients(model, through)[name], expected[name]) > 0.01


@pytest.mark.parametrize(("rule", "carried_over"), CHECKPOINTED.items())
def test_checkpointed_activations_change_neither_loss_nor_gradients(fairseq, text, rule, carried_over):
    results, dropout = [], "--dropout 0.2 --attention-dropout 0.2"
    for checkpointing in ("", "--checkpoint-activations"):
        model = fairseq.build(f"--update-rule {rule} {NO_POSITIONS} {dropout} {checkpointing}").train()
        assert hasattr(model.decoder.layers[0], "precheckpoint_forward") == bool(checkpointing)
        torch.manual_seed(4)
        steps = {}
        for i in range(3):
            rows = {"continues": torch.full((BATCH,), i > 0)} if carried_over else {}
            loss = loss_of(model, text(BATCH, 9, seed=i), **rows)
            steps |= {f"{name} {i}": x for name, x in {"loss": loss.detach(), **gradients(model, loss)}.items()}
        results.append(steps)
    assert_close(*results, 1e-6)  # the same operations on the same numbers


def test_dropped_layers_pass_on_their_states(fairseq, text):
    model, tokens = fairseq.build(f"{NO_POSITIONS} --dropout 0 --decoder-layerdrop 0.5").train(), text(BATCH, TIME)
    for p, segment, rows in ((-1, tokens[:, :4], BEGIN), (1, tokens[:, 4:9], CONTINUE), (-1, tokens[:, 9:], CONTINUE)):
        model.decoder.layers.p = p  # all layers, none of them, all
        out = model(segment, continues=rows)[0]
    assert relative_error(out, model(tokens[:, [0, 1, 2, 3, 9, 10, 11]])[0][:, 4:]) <= FLOAT32


def test_unseen_rows_start_empty_and_those_of_another_batch_are_refused(fairseq, text, caplog):
    model, tokens = fairseq.build(NO_POSITIONS), text(BATCH, TIME)
    assert torch.equal(model(tokens, continues=CONTINUE)[0], model(tokens)[0])
    assert "start empty" in caplog.text
    caplog.clear()
    model(tokens, continues=CONTINUE)
    assert "start empty" not in caplog.text
    for rows in (1, 2, 4):
        other, some = text(rows, TIME, seed=1), torch.arange(rows) == rows - 1
        with pytest.raises(ValueError, match=rf"continues has {rows} rows, .* had 3; .*same size"):
            model(other, continues=some)
    assert torch.equal(model(other, continues=BEGIN[:1].expand(4))[0], model(other)[0])


def test_states_that_are_carried_can_be_taken_along(fairseq, text):
    """By another process: the keys under which a module finds its state are not the same there."""
    model, other = (fairseq.build(f"{NO_POSITIONS} --dropout 0 --update-rule decay").train() for _ in range(2))
    tokens = text(BATCH, 6)
    assert other.decoder.carried_states() == []
    model(tokens, continues=BEGIN)
    states = model.decoder.carried_states()
    assert len(states) == 2 and all(x.abs().sum() > 0 for layer in states for x in layer.values())
    other.decoder.restore_carried_states(states)
    assert torch.equal(other(tokens, continues=CONTINUE)[0], model(tokens, continues=CONTINUE)[0])
    with pytest.raises(ValueError, match="states has 1 layers; the model has 2"):
        other.decoder.restore_carried_states(states[:1])
