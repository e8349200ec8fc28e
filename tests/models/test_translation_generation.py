"""fairseq's sequence generator and scorer with fast weights: every hypothesis has the score that the whole target has
in one pass, whatever moved its rows, and whatever else was in the batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fairseq import search
from fairseq.data.data_utils import collate_tokens
from fairseq.sequence_generator import SequenceGenerator
from fairseq.sequence_scorer import SequenceScorer

from fairseq_fastweights.feature_maps import FEATURE_MAPS
from fairseq_fastweights.mixers.fast_weight_source_attention import FastWeightSourceAttention
from fairseq_fastweights.mixers.update_rules import UPDATE_RULES
from tests.models.translation import PAD, SCORES, SUBSETS, batch, log_probs, sentences, shifted, with_map

SOURCES = sentences((5, 9, 1, 7, 3))
ENDS = (6, 3, 8, 1, 5)

# Each place with each rule and each map, dealt out; then other mixers, and what else changes the state.
CASES: list[dict[str, Any]] = [
    {"fast_weight_attention": places, "update_rule": rule, "feature_map": name}
    for places, rule, name in zip(
        SUBSETS, itertools.cycle(["delta", *UPDATE_RULES, "retention"]), itertools.cycle(FEATURE_MAPS), strict=False
    )
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
    orders, shared, decoder = [], [], model.decoder
    reorder, forward = decoder.reorder_incremental_state_scripting, decoder.forward

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


def generate(generator: SequenceGenerator, sources=SOURCES, prefix=None) -> list[list[dict[str, Any]]]:
    return generator.generate([], {"net_input": batch(sources)}, prefix_tokens=prefix)


def assert_scored(models: list[Any], hypotheses: list[list[dict[str, Any]]]) -> None:
    """Of every token the logarithm of the models' mean probability, in one pass over the whole target, alone."""
    for source, found in zip(SOURCES, hypotheses, strict=True):
        assert found
        for hypothesis in found:
            single = torch.stack([log_probs(model, source, hypothesis["tokens"]) for model in models])
            expected = single.logsumexp(dim=0) - math.log(len(models))
            assert (hypothesis["positional_scores"] - expected).abs().max() <= SCORES


def assert_same(actual: list[list[dict[str, Any]]], expected: list[list[dict[str, Any]]]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        assert [h["tokens"].tolist() for h in ours] == [h["tokens"].tolist() for h in theirs]
        for hypothesis, other in zip(ours, theirs, strict=True):
            assert (hypothesis["positional_scores"] - other["positional_scores"]).abs().max() <= SCORES
            assert abs(hypothesis["score"] - other["score"]) <= SCORES


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
    # A beam shares the memory of its source.
    assert bool(shared) == ("cross" in options.get("fast_weight_attention", "cross"))
    assert all(rows == beam * sources for rows, sources in shared)


def test_a_search_after_another_is_as_if_it_were_the_first():
    """The model is told of a beam's size once; that of the search before stays."""
    model = model_of({})
    expected = {beam: generate(generator_for([model_of({})], beam_size=beam)) for beam in (1, 4, 5)}
    # One beam of 5 for 5 sentences, each on its own: as many rows as a beam of the search before.
    for beam in (5, 1, 4, 5):
        assert_same(generate(generator_for([model], beam_size=beam)), expected[beam])
    # Two generators for one model, in turns.
    wide, narrow = generator_for([model], beam_size=5), generator_for([model], beam_size=4)
    for generator, beam in ((wide, 5), (narrow, 4), (wide, 5)):
        assert_same(generate(generator), expected[beam])


@pytest.mark.parametrize("options", [{"update_rule": "delta"}, {"feature_map": "favor"}], ids=str)
def test_a_sentence_is_translated_alone_as_in_a_batch(options):
    generator = generator_for([model_of(options)])
    alone = [generate(generator, [source])[0] for source in SOURCES]
    order = [3, 0, 4, 2, 1]
    assert_same(generate(generator, [SOURCES[i] for i in order]), [alone[i] for i in order])


@pytest.mark.parametrize(("options", "beam"), [({"update_rule": "delta"}, 1), ({"update_rule": "decay"}, 4)], ids=str)
def test_a_prefix_is_said_and_scored(options, beam):
    model = model_of(options)
    prefix = shifted(sentences((5, 2, 4, 3, 1), seed=7))[:, 1:]  # of 4, 1, 3, 2 words and none
    hypotheses = generate(generator_for([model], beam_size=beam), prefix=prefix)
    for row, found in zip(prefix, hypotheses, strict=True):
        said = row[row != PAD].tolist()
        assert all(hypothesis["tokens"][: len(said)].tolist() == said for hypothesis in found)
    assert_scored([model], hypotheses)


@pytest.mark.parametrize(
    ("members", "beam"),
    [
        ([{}, {}], 4),
        ([{"update_rule": "gated"}, {"update_rule": "delta", "feature_map": "dpfp"}], 1),
        ([{}, {"fast_weight_attention": "none"}], 4),
        ([{"fast_weight_attention": "none"}, {}], 4),
        ([{"fast_weight_attention": "encoder,decoder"}, {}], 1),
        ([{}, {"decoder_embed_dim": 24, "encoder_embed_dim": 24, "decoder_layers": 1}], 4),
        ([{}, {"feature_map": "relu"}, {"feature_map": "favor"}], 4),
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


SEARCHES: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "beam": (search.BeamSearch, {}),
    "sampling": (search.Sampling, {}),
    "sampling of the best": (partial(search.Sampling, sampling_topk=3), {}),
    "sampling of the most likely": (partial(search.Sampling, sampling_topp=0.7), {}),
    "diverse groups": (partial(search.DiverseBeamSearch, num_groups=2, diversity_strength=0.8), {}),
    "groups of one": (partial(search.DiverseBeamSearch, num_groups=4, diversity_strength=0.5), {}),
    "diverse siblings": (partial(search.DiverseSiblingsSearch, diversity_rate=0.5), {}),
    "temperature": (search.BeamSearch, {"temperature": 1.7}),
}


@pytest.mark.parametrize(("name", "rule"), list(zip(SEARCHES, itertools.cycle(["sum", "delta"]), strict=False)))
def test_every_search_finds_what_it_finds_without_a_state(name, rule):
    """Without a state every step reads the whole prefix again, and nothing is reordered."""
    model, (strategy, options) = model_of({"update_rule": rule}), SEARCHES[name]
    results = []
    for incremental in (True, False):
        generator = generator_for([model], search_strategy=strategy(model.decoder.dictionary), **options)
        generator.model.has_incremental = incremental
        torch.manual_seed(1)  # of samples
        results.append(generate(generator))
    assert_same(*results)
    if name != "beam":  # and it is another search
        best = [
            [found[0]["positional_scores"].tolist() for found in x]
            for x in (results[0], generate(generator_for([model])))
        ]
        assert best[0] != best[1]


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
