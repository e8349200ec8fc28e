"""Decode steps of translation by the number of tokens before them, beside fairseq's Transformer.

Models of one size make the steps of fairseq's `SequenceGenerator`; the Transformer's KV cache is filled with random
keys and values. Sources are of one length, or as long as the target so far. Whole translations by `SequenceGenerator`,
encoder included, show whether the steps add up. The page describes the measurements. Takes up to 5 GB of memory.

    python benchmarks/translation.py [--out results.json]
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.sequence_generator import SequenceGenerator
from harness import records
from harness.models import build_model, fill_cache
from harness.program import COMMON, finish, make_parser, parse
from harness.timing import FEWEST_ROUNDS, Budget, clock_for, held, peak, time_in_turns, time_tokens
from torch import Tensor
from torch.utils._pytree import tree_map

TRANSFORMER = "transformer"
# Settings of linear attention. Heads of 128 give 128, 512 and 256 features.
MAPS = {
    "elu": {"feature-map": "elu"},
    "dpfp-2": {"feature-map": "dpfp", "dpfp-nu": 2},
    "favor-128": {"feature-map": "favor", "favor-features": 128},
}
# 1 comes first: fairseq informs a model of larger beams only.
BEAMS = (1, 4)
LENGTHS = (64, 256, 1024, 2048)
# The size is that of fairseq's iwslt_de_en. There are `hypotheses` in all, of fewer sentences where the beam is wider.
# `source` and `whole` count tokens: of a source, of a whole translation.
SETTINGS = {"layers": 6, "width": 512, "heads": 4, "feed-forward": 1024, "words": 8000}
SETTINGS |= {"hypotheses": 8, "source": 64, "whole": 256}
QUICK_SETTINGS = {"layers": 1, "width": 16, "heads": 2, "feed-forward": 16, "words": 20}
QUICK_SETTINGS |= {"hypotheses": 8, "source": 4, "whole": 5}


def build(name: str, settings: dict[str, int], longest: int) -> tuple[Any, Dictionary]:
    """fairseq's Transformer, or the model with fast weights in place of all its attention; and the dictionary."""
    flags: dict[str, object] = {f"max-{side}-positions": longest + 2 for side in ("source", "target")}
    for side in ("encoder", "decoder"):
        flags |= {f"{side}-layers": settings["layers"], f"{side}-attention-heads": settings["heads"]}
        flags |= {f"{side}-embed-dim": settings["width"], f"{side}-ffn-embed-dim": settings["feed-forward"]}
    arch = "transformer_iwslt_de_en" if name == TRANSFORMER else "fast_weight_transformer_iwslt_de_en"
    return build_model("translation", arch, flags | MAPS.get(name, {}), settings["words"])


def build_generator(model: Any, dictionary: Dictionary, beam: int, length: int) -> SequenceGenerator:
    """A generator whose translations all have `length` tokens."""
    return SequenceGenerator([model], dictionary, beam_size=beam, max_len_a=0, max_len_b=length, min_len=length)


@dataclass
class Hypotheses:
    """The tensors that the generator holds between two tokens, for an ensemble of one model."""

    tokens: Tensor  # (rows, tokens so far and the symbol before them), those of a sentence `beam` rows one by one
    scores: Tensor  # the sums of their logarithmic probabilities
    order: Tensor  # which of the rows before each continues
    encoder_outs: list[dict[str, list[Tensor]]]
    states: list[dict[str, Any]]

    def clone(self) -> Hypotheses:
        """The same, with outputs and states of its own."""
        own = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, (self.encoder_outs, self.states))
        return replace(self, encoder_outs=own[0], states=own[1])

    def sizes(self) -> dict[str, int]:
        """Bytes of the states and of the encoder's outputs, all hypotheses together."""
        return {"state bytes": held(self.states), "encoder bytes": held(self.encoder_outs)}


def hypotheses_after(generator: SequenceGenerator, name: str, source: Tensor, length: int, rows: int) -> Hypotheses:
    """Random tensors of the generator after `length` tokens, in `rows` hypotheses of one source."""
    ensemble, device = generator.model, source.device
    tokens = torch.randint(4, generator.vocab_size, (rows, length + 1), device=device)
    scores = -torch.rand(rows, length, device=device).cumsum(dim=1)
    state: dict[str, Any] = {}
    with torch.no_grad():
        encoder_outs = ensemble.forward_encoder(sample(source, 1)["net_input"])
        # One row for each hypothesis, of the one encoded source.
        encoder_outs = ensemble.reorder_encoder_out(encoder_outs, torch.zeros(rows, dtype=torch.int64, device=device))
        ensemble.forward_decoder(tokens[:, :1], encoder_outs, [state])
    if name == TRANSFORMER:
        fill_cache(ensemble.single_model.decoder.layers, state, rows, length, device)
    # Within a beam all hypotheses change places.
    order = torch.arange(rows, device=device).view(-1, generator.beam_size).flip(1).flatten()
    return Hypotheses(tokens, scores, order, encoder_outs, [state])


def advance(generator: SequenceGenerator, hypotheses: Hypotheses) -> Any:
    """A decode step of the generator, without small work that is the same for all models."""
    ensemble, beam = generator.model, generator.beam_size
    rows, step = hypotheses.scores.shape
    with torch.no_grad():
        ensemble.reorder_incremental_state(hypotheses.states, hypotheses.order)
        hypotheses.encoder_outs = ensemble.reorder_encoder_out(hypotheses.encoder_outs, hypotheses.order)
        scores, _ = ensemble.forward_decoder(hypotheses.tokens, hypotheses.encoder_outs, hypotheses.states)
        by_sentence = (rows // beam, beam, -1)
        return generator.search.step(step, scores.view(by_sentence), hypotheses.scores.view(by_sentence))


def sample(source: Tensor, sentences: int) -> dict[str, dict[str, Tensor]]:
    """A batch as fairseq makes it, of so many times the same sentence."""
    lengths = torch.full((sentences,), len(source), device=source.device)
    return {"net_input": {"src_tokens": source.repeat(sentences, 1), "src_lengths": lengths}}


def main() -> None:
    options = parse(make_parser(__doc__, *COMMON, maps=tuple(MAPS)))
    lengths, settings = ((4, 8), QUICK_SETTINGS) if options.quick else (LENGTHS, SETTINGS)
    budget, device = Budget(options.budget), options.device
    draw_source = partial(torch.randint, 4, settings["words"], device=device)
    longest = max(*lengths, settings["whole"])
    models = {name: build(name, settings, longest) for name in (TRANSFORMER, *options.maps)}
    # By name pairs of lengths: of a source, and of its translation so far.
    sources = {
        "sources of one length": [(settings["source"], length) for length in lengths],
        "sources as long as the target": [(length, length) for length in lengths if length != settings["source"]],
    }
    parts = len(BEAMS) * len(sources) + 1  # whole translations are one too
    rows: list[dict[str, Any]] = []
    for beam in BEAMS:
        generators = {
            name: build_generator(model.to(device), dictionary, beam, settings["whole"])
            for name, (model, dictionary) in models.items()
        }
        for label, cases in sources.items():
            take_ups, found = {}, {}
            for source_length, length in cases:
                source = draw_source((source_length,))
                for name, generator in generators.items():
                    hypotheses = hypotheses_after(generator, name, source, length, settings["hypotheses"])
                    # Each call continues a generation from a copy of these tensors. The peak counts a call alone,
                    # without tensors that it has replaced, as in generation.
                    key, step = f"{name} {source_length} {length}", partial(advance, generator)
                    take_ups[key] = lambda step=step, before=hypotheses: partial(step, before.clone())
                    found[key] = {"model": name, "beam": beam, "source": source_length, "length": length}
                    found[key] |= {**hypotheses.sizes(), "peak bytes": peak(hypotheses.clone, step, device)}
            seconds = time_tokens(take_ups, device, options.rounds, budget, parts, f"beam {beam}, {label}")
            rows += [row | {"seconds": seconds[key]} for key, row in found.items()]
            parts -= 1
    # Whole translations take long: each is measured once in a round, in few rounds.
    batch = sample(draw_source((settings["source"],)), settings["hypotheses"] // beam)
    calls = {name: partial(generator.generate, [], batch) for name, generator in generators.items()}
    rounds = min(options.rounds, FEWEST_ROUNDS)
    seconds, _ = time_in_turns(calls, dict.fromkeys(calls, (1.0, 0.0)), clock_for(device), rounds)
    common = {"beam": beam, "source": settings["source"], "length": settings["whole"]}
    whole = [{"model": name, **common, "seconds": seconds[name]} for name in generators]
    facts = {"settings": settings, "cut": budget.cut, "rows": rows, "whole": whole}
    finish(records.save("translation", options, **facts), options)


if __name__ == "__main__":
    main()
