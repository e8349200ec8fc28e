"""Decode steps by the number of tokens before them: Figure 1 of Mao (2022), beside fairseq's Transformer.

Models of one size take turns of some decode steps, each going on where it stopped, in a range around the length; the
page describes the measurements. The lengths are measured one after the other: beside caches of other lengths, a KV
cache would get fresh pages instead of those that it has released. Between lengths the Transformer reads every token,
or, if they are many, its KV cache is filled with random keys and values. The state of linear attention has one size.

    python benchmarks/generation.py [--device cuda] [--batch 32] [--out results.json] [--figure figure.png]
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from harness import figures, records
from harness.models import build_model, fill_cache
from harness.program import COMMON, finish, make_parser, parse, positive
from harness.timing import TOKENS_OF_A_TURN, Budget, held, peak, time_tokens
from torch import Tensor

TRANSFORMER = "transformer"
RULES = ("delta", "decay", "sum")
LENGTHS = (64, 250, 500, 1000, 2000, 4000)
MOST_READ = 500  # tokens on the way to the next length; more would take minutes
SETTINGS = {"layers": 6, "width": 512, "heads": 8, "feed-forward": 2048, "words": 10_000, "batch": 8}
QUICK_SETTINGS = {"layers": 1, "width": 16, "heads": 2, "feed-forward": 16, "words": 20, "batch": 2}


def build(name: str, settings: dict[str, int], backend: str, longest: int) -> Any:
    """fairseq's Transformer language model, or the fast weight model with that rule."""
    flags: dict[str, object] = {f"decoder-{part}-dim": settings["width"] for part in ("embed", "input", "output")}
    flags |= {"decoder-layers": settings["layers"], "decoder-attention-heads": settings["heads"]}
    flags |= {"decoder-ffn-embed-dim": settings["feed-forward"]}
    flags |= {"tokens-per-sample": longest, "max-target-positions": longest}
    fast = {} if name == TRANSFORMER else {"update-rule": name, "fast-weight-backend": backend}
    arch = "fast_weight_lm" if fast else "transformer_lm"
    return build_model("fast_weight_language_modeling", arch, flags | fast, settings["words"])[0]


@dataclass
class Generation:
    """Decodes rows of `tokens`, (batch, time), of which `length` have been read into fairseq's incremental `state`."""

    model: Any
    tokens: Tensor
    length: int = 0
    state: dict[str, Any] = field(default_factory=dict)

    def advance(self) -> Tensor:
        """A decode step of every row; returns its logits, (batch, 1, vocabulary)."""
        self.length += 1
        with torch.no_grad():
            return self.model(self.tokens[:, : self.length], incremental_state=self.state)[0]

    def go_on(self, name: str, length: int, most_read: int = 0) -> Generation:
        """Advances to `length` tokens; for more than `most_read` the KV cache is filled with random ones."""
        if name == TRANSFORMER and length - self.length > most_read:
            self.state.clear()
            fill_cache(self.model.decoder.layers, self.state, len(self.tokens), length, self.tokens.device)
        elif name == TRANSFORMER:
            while self.length < length:
                self.advance()
        elif not self.state:
            self.length = length - 1
            self.advance()
        self.length = length
        return self


def memory(model: Any, name: str, tokens: Tensor, length: int, device: str) -> dict[str, int]:
    """Bytes of the state after `length` tokens, and the peak of the state and the tensors of a decode step."""
    size = held(Generation(model, tokens).go_on(name, length).state)
    most = peak(lambda: Generation(model, tokens).go_on(name, length), Generation.advance, device)
    return {"state bytes": size, "peak bytes": most}


def main() -> None:
    parser = make_parser(__doc__, *COMMON, "--backend", "--figure", rules=RULES)
    parser.add_argument("--batch", type=positive, help=f"texts at a time (default: {SETTINGS['batch']})")
    options = parse(parser)
    lengths, settings = ((16, 32), QUICK_SETTINGS) if options.quick else (LENGTHS, SETTINGS)
    settings = settings | {"batch": options.batch or settings["batch"]}
    # A range begins before its length, by a turn that does not count and by half of the rounds.
    ahead = (2 + options.rounds) * (TOKENS_OF_A_TURN + 1) // 2
    most = (2 * min(lengths) - 1) // (TOKENS_OF_A_TURN + 1) - 2
    if options.rounds > most:
        parser.error(f"--rounds is {options.rounds}: it may be {most} at most, or the text is shorter than a range")
    budget = Budget(options.budget)
    longest = max(lengths) + ahead
    names = (TRANSFORMER, *options.rules)
    models = {name: build(name, settings, options.backend, longest).to(options.device) for name in names}
    tokens = torch.randint(4, settings["words"], (settings["batch"], longest), device=options.device)
    # All sizes are measured before all times, so that a KV cache finds its own pages again.
    rows: dict[tuple[str, int], dict[str, Any]] = {
        (name, length): memory(models[name], name, tokens, length, options.device)
        for name, length in itertools.product(names, lengths)
    }
    generations = {name: Generation(model, tokens).go_on(name, 1) for name, model in models.items()}

    def timed(going: dict[Any, Generation], parts: int, label: str) -> dict[Any, dict[str, float]]:
        calls = {name: lambda g=g: g.advance for name, g in going.items()}
        return time_tokens(calls, options.device, options.rounds, budget, parts, label)

    for number, length in enumerate(lengths):
        begin = length - ahead
        for name, generation in generations.items():
            generation.go_on(name, begin, MOST_READ)
        parts = len(lengths) + len(options.rules) - number
        seconds = timed(generations, parts, f"after {length:,}")
        for name, generation in generations.items():
            # The first turn and the first decode step of a turn do not count.
            span = {"first": begin + TOKENS_OF_A_TURN + 2, "last": generation.length - 1}
            rows[name, length] |= {"model": name, "length": length, **span, "seconds": seconds[name]}
    generations.clear()  # with their KV caches
    for number, name in enumerate(options.rules):
        # Without the Transformer: the lengths of a rule take turns.
        growth = {n: Generation(models[name], tokens).go_on(name, n - ahead) for n in lengths}
        for n, found in timed(growth, len(options.rules) - number, f"{name}, its lengths in turns").items():
            rows[name, n]["seconds beside other lengths"] = found
    parameters = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    facts = {"settings": settings, "backend": options.backend, "parameters": parameters, "cut": budget.cut}
    in_order = [rows[name, length] for length in lengths for name in names]
    finish(records.save("generation", options, **facts, rows=in_order), options, figures.draw_next_token)


if __name__ == "__main__":
    main()
