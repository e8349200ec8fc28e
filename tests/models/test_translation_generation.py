"""With fairseq's generator and scorer every hypothesis has the score that the whole target has in one pass."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fairseq import search
from fairseq.data.data_utils import collate_tokens
from fairseq.sequence_generator import SequenceGenerator
from fairseq.sequence_scorer import SequenceScorer

from fairseq_fastweights.mixers.fast_weight_source_attention import FastWeightSourceAttention
from fairseq_fastweights.mixers.feature_maps import FEATURE_MAPS
from fairseq_fastweights.mixers.update_rules import UPDATE_RULES
from tests.models.translation import PAD, SCORES, SUBSETS, batch, log_probs, sentences, shifted, with_map

SOURCES = sentences((5, 9, 1, 7, 3))
ENDS = (6, 3, 8, 1, 5)
# Each place with each rule and each map, dealt out; then other mixers, and other options that change the state.
RULES = itertools.cycle(["delta", *UPDATE_RULES, "retention"])
CASES: list[dict[str, Any]] = [
    {"fast_weight_attention": places, "update_rule": rule, "feature_map": name}
    for places, rule, name in zip(SUBSETS, RULES, itertools.cycle(FEATURE_MAPS), strict=False)
]
CASES += [
    {"update_rule": "delta", "normalization": "sum,attention,removal"},
    {"update_rule": "delta", "feature_map": "dpfp"},
    {"update_rule": "retention", "encoder_embed_dim": 24, "decoder_embed_dim": 16},
    {"update_rule": "gated", "decoder_learned_pos": True, "decoder_normalize_before": True},
    *({"mixers": x} for x in ("local,softmax:2", "mamba", "kimi-delta", "abc", "linformer", "transformer-xl")),
]


def model_of(options: dict[str, Any], seed: int = 0) -> Any:
    return with_map(**{"feature_map": "auto", **options}, seed=seed)


class Ending(search.BeamSearch):
    """Beam search where sentence i of the batch ends after `ENDS[i]` words, and leaves the batch."""

    def step(self, step, lprobs, scores, prev_output_tokens=None, original_batch_idxs=None):  # type: ignore[no-untyped-def]
        for row, sentence in enumerate(original_batch_idxs.tolist()):
            end = lprobs[row, :, self.eos].clone()
            if step == ENDS[sentence]:
                lprobs[row] = -math.inf
            lprobs[row, :, self.eos] = end if step == ENDS[sentence] else -math.inf
        return super().step(step, lprobs, scores, prev_output_tokens, original_batch_idxs)


@contextmanager
def watched(model: Any) -> Iterator[tuple[list[torch.Tensor], list[tuple[int, int]]]]:
    """The orders of rows that a generator asks for, and of how many rows the memories of cross attention hold which."""
    orders, shared, decoder, forward = [], [], model.decoder, model.decoder.forward
    reorder = decoder.reorder_incremental_state_scripting

    def reordering(state: Any, order: torch.Tensor) -> None:
        orders.append(order)
        reorder(state, order)

    def reading(tokens: torch.Tensor, *arguments: Any, incremental_state: Any, **options: Any) -> Any:
        out = forward(tokens, *arguments, incremental_state=incremental_state, **options)
        memories = [x.encoder_attn for x in decoder.layers if isinstance(x.encoder_attn, FastWeightSourceAttention)]
        shared.extend((len(tokens), len(incremental_state[memory]["state"])) for memory in memories)
        return out

    with patch.multiple(decoder, reorder_incremental_state_scripting=reordering, forward=reading):
        yield orders, shared


def generator_for(models: list[Any], beam_size: int = 4, **options: Any) -> SequenceGenerator:
    return SequenceGenerator(models, models[0].decoder.dictionary, beam_size, max_len_b=10, min_len=1, **options)


def generate(generator: SequenceGenerator) -> list[list[dict[str, Any]]]:
    return generator.generate([], {"net_input": batch(SOURCES)})


def assert_scored(models: list[Any], hypotheses: list[list[dict[str, Any]]]) -> None:
    """The logarithm of the models' mean probability of every token, in one pass over the whole target, alone."""
    for source, found in zip(SOURCES, hypotheses, strict=True):
        assert found
        for hypothesis in found:
            single = torch.stack([log_probs(model, source, hypothesis["tokens"]) for model in models])
            expected = single.logsumexp(dim=0) - math.log(len(models))
            assert (hypothesis["positional_scores"] - expected).abs().max() <= SCORES


def assert_same(actual: list[list[dict[str, Any]]], expected: list[list[dict[str, Any]]]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        for name in ("tokens", "positional_scores", "score"):
            of_each = ([torch.as_tensor(hypothesis[name]) for hypothesis in found] for found in (ours, theirs))
            torch.testing.assert_close(*of_each, rtol=0, atol=SCORES)


@pytest.mark.parametrize(("options", "beam"), list(zip(CASES, itertools.cycle([4, 1, 8]), strict=False)), ids=str)
def test_hypotheses_have_the_scores_of_the_whole_target(options, beam):
    model = model_of(options)
    generator = generator_for([model], beam_size=beam, search_strategy=Ending(model.decoder.dictionary))
    with watched(model) as (orders, shared):
        hypotheses = generate(generator)
    assert all(len(found) == beam for found in hypotheses)
    # Sentences left, and hypotheses overtook one another, after the first step, where all are one.
    moved = any(not torch.equal(order % beam, torch.arange(len(order)) % beam) for order in orders[1:])
    assert moved == (beam > 1) and len({len(order) for order in orders}) > 1, "the test shows nothing"
    assert_scored([model], hypotheses)
    assert bool(shared) == ("cross" in options.get("fast_weight_attention", "cross"))
    assert all(rows == beam * sources for rows, sources in shared)  # a beam shares the memory of its source


def test_a_search_after_another_is_as_if_it_were_the_first():
    """The model is told of a beam's size once; that of the search before stays."""
    model = model_of({})
    expected = {beam: generate(generator_for([model_of({})], beam_size=beam)) for beam in (1, 4, 5)}
    for beam in (5, 1, 4, 5):  # 5 sentences alone are as many rows as a beam of the search before
        assert_same(generate(generator_for([model], beam_size=beam)), expected[beam])
    wide, narrow = generator_for([model], beam_size=5), generator_for([model], beam_size=4)  # in turns
    for generator, beam in ((wide, 5), (narrow, 4), (wide, 5)):
        assert_same(generate(generator), expected[beam])


@pytest.mark.parametrize(
    ("members", "beam"),
    [
        ([{"fast_weight_attention": "none"}, {}], 4),
        ([{"fast_weight_attention": "encoder,decoder"}, {"update_rule": "delta", "feature_map": "dpfp"}], 1),
        ([{}, {"encoder_embed_dim": 24, "decoder_embed_dim": 24, "decoder_layers": 1}, {"feature_map": "favor"}], 4),
    ],
    ids=str,
)
def test_ensembles_have_the_mean_probability_of_their_models(members, beam):
    models = [model_of(options, seed) for seed, options in enumerate(members)]
    hypotheses = generate(generator_for(models, beam))
    assert_scored(models, hypotheses)
    best, first = ([found[0] for found in x] for x in (hypotheses, generate(generator_for(models[:1], beam))))
    pairs = [(x["positional_scores"], y["positional_scores"]) for x, y in zip(best, first, strict=True)]
    assert any(len(x) != len(y) or (x - y).abs().max() > 0.01 for x, y in pairs)
    # As `fairseq-generate --score-reference` scores them.
    targets = [hypothesis["tokens"] for hypothesis in best]
    sample = {"net_input": {**batch(SOURCES), "prev_output_tokens": shifted(targets)}}
    sample["target"] = collate_tokens(targets, PAD)
    references = SequenceScorer(models[0].decoder.dictionary).generate(models, sample)
    assert_same([[x] for x in best], references)


def test_a_source_is_copied_only_when_its_rows_change():
    """Hypotheses that change places with others for the same source leave the encoder's output as it is."""
    encoder = model_of({}).encoder
    alone = encoder(**batch(SOURCES[:3]))
    beams = encoder.reorder_encoder_out(alone, torch.tensor([0, 0, 1, 1, 2, 2]))
    assert encoder.reorder_encoder_out(beams, torch.tensor([1, 0, 3, 3, 4, 5])) is beams
    for order, sources in (([3, 2, 5, 4], [1, 1, 2, 2]), ([1, 0, 3, 2, 4, 4], [0, 0, 1, 1, 2, 2]), ([4, 0], [2, 0])):
        moved = encoder.reorder_encoder_out(beams, torch.tensor(order))
        assert torch.equal(moved["encoder_out"][0], alone["encoder_out"][0][:, sources])
        assert torch.equal(moved["encoder_padding_mask"][0], alone["encoder_padding_mask"][0][sources])
    once_more = encoder.reorder_encoder_out(moved, torch.tensor([1, 1]))
    assert torch.equal(once_more["encoder_out"][0], alone["encoder_out"][0][:, [0, 0]])
