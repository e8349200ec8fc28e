"""The next token, by how many there are before it: Figure 1 of Mao (2022), with fairseq's Transformer for attention.

Models of one size, one step of `fairseq-generate`'s kind: a forward pass in evaluation mode for the last token of every
row, with fairseq's incremental state, output layer included. Generation rolls forward: the models take turns of some
tokens, each going on where it stopped, in a stretch with the length in its middle. The lengths come one after the
other: beside caches of other lengths a cache would find its memory taken, and get fresh pages where in generation it
gets those that it left. From one length to the next the Transformer reads every token, where they are few; where they
are many, its key-value cache is filled with random keys and values. A fast weight model's state has the size that it
has after any token.

What to expect is timed too: fairseq copies the whole cache for a token, and reads the copy. Whether a fast weight
model's token takes the same time at every length is timed once more, without the Transformer: its large caches leave
the others a memory that is colder the longer the text is. The lengths of one model take turns there.

    python benchmarks/generation.py [--out results.json] [--figure figure.png]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import figures, records, targets
from harness.measuring import add_options, list_of, set_up
from harness.memory import held, peak
from harness.models import build_language_model
from harness.next_token_tables import render
from harness.rolling import TOKENS_OF_A_TURN, fill_cache, time_tokens
from harness.timing import FEWEST_ROUNDS, Budget, Call
from torch import Tensor

TRANSFORMER = "transformer"
RULES = ("delta", "decay", "sum")
LENGTHS = (64, 250, 500, 1000, 2000, 4000)
QUICK_LENGTHS = (16, 32)
# Tokens that are read to come to the next length; more would take minutes.
MOST_READ = 500
SETTINGS = {"layers": 6, "width": 512, "heads": 8, "feed-forward": 2048, "words": 10_000, "batch": 8}
QUICK_SETTINGS = {"layers": 1, "width": 16, "heads": 2, "feed-forward": 16, "words": 20, "batch": 2}


def build(name: str, settings: dict[str, int], backend: str, longest: int) -> Any:
    """fairseq's Transformer language model, or the fast weight model with that rule."""
    width = str(settings["width"])
    flags = ["--decoder-layers", str(settings["layers"]), "--decoder-attention-heads", str(settings["heads"])]
    for what in ("embed", "input", "output"):
        flags += [f"--decoder-{what}-dim", width]
    flags += ["--decoder-ffn-embed-dim", str(settings["feed-forward"]), "--share-decoder-input-output-embed"]
    flags += ["--tokens-per-sample", str(longest), "--max-target-positions", str(longest)]
    if name == TRANSFORMER:
        return build_language_model("transformer_lm", flags, settings["words"])
    flags += ["--update-rule", name, "--fast-weight-backend", backend]
    return build_language_model("fast_weight_lm", flags, settings["words"])


@dataclass
class Generation:
    """Rows that are generated token by token.

    Attributes:
        tokens: (rows, as many as will be read), of any values.
        length: how many of them have been read.
        state: fairseq's incremental state after them.
    """

    model: Any
    tokens: Tensor
    length: int
    state: dict[str, Any] = field(default_factory=dict)

    def advance(self) -> Tensor:
        """Reads one more token of every row, and returns the logits of those that may follow."""
        self.length += 1
        with torch.no_grad():
            return self.model(self.tokens[:, : self.length], incremental_state=self.state)[0]


def generation_after(model: Any, name: str, tokens: Tensor, length: int) -> Generation:
    """A generation that goes on after `length` of these tokens."""
    if name == TRANSFORMER:
        generation = Generation(model, tokens, length)
        fill_cache(model.decoder.layers, generation.state, len(tokens), length, tokens.device)
    else:
        generation = Generation(model, tokens, length - 1)
        generation.advance()
    return generation


def go_on(generation: Generation, name: str, length: int) -> None:
    """Brings a generation to where it goes on after `length` tokens."""
    if name == TRANSFORMER and length - generation.length > MOST_READ:
        generation.state.clear()
        tokens = generation.tokens
        fill_cache(generation.model.decoder.layers, generation.state, len(tokens), length, tokens.device)
    elif name == TRANSFORMER:
        while generation.length < length:
            generation.advance()
    generation.length = length


def move_cache(state: dict[str, Any]) -> None:
    """Does the least that fairseq's attention does with its cache: copies keys and values, and reads the copies."""
    for buffer in state.values():
        for what in ("prev_key", "prev_value"):
            buffer[what].clone().sum()


def memory(model: Any, name: str, tokens: Tensor, length: int, device: str) -> dict[str, int]:
    """Bytes of the state after so many tokens, and the most that it and the tensors of one more token take at a time.

    A cache that has been replaced by a longer one is gone, as it is in generation.
    """
    sizes = {}

    def prepare() -> Generation:
        generation = generation_after(model, name, tokens, length)
        sizes["state bytes"] = held(generation.state)
        return generation

    most = peak(prepare, Generation.advance, device)
    return sizes | {"peak bytes": most}


def tokens_ahead(rounds: int) -> int:
    """How far before a length its stretch begins: by a turn that does not count and half of the rounds."""
    turn = TOKENS_OF_A_TURN + 1
    return turn + rounds * turn // 2


def measure_length(
    generations: dict[str, Generation], length: int, options: argparse.Namespace, allowed: float
) -> tuple[list[dict[str, Any]], int]:
    """A row for each model, and the rounds that were made.

    Args:
        generations: by model, each after fewer tokens than its stretch begins with; they go on to its end.
        allowed: seconds for it.
    """
    budget = Budget(allowed)
    begin = length - tokens_ahead(options.rounds)
    for name, generation in generations.items():
        go_on(generation, name, begin)
    take_ups: dict[str, Callable[[], Call]] = {name: lambda g=g: g.advance for name, g in generations.items()}
    seconds, made = time_tokens(take_ups, options.device, options.rounds, budget)
    # Not in turns with the tokens: copies between them would take the memory that the cache left, as another's do.
    cache = {"cache": lambda: partial(move_cache, generations[TRANSFORMER].state)}
    moved, _ = time_tokens(cache, options.device, FEWEST_ROUNDS, budget)
    # After the turn that does not count, and the first token of the next.
    first = begin + TOKENS_OF_A_TURN + 2
    rows = []
    for name, generation in generations.items():
        timed = {"length": length, "first": first, "last": generation.length - 1}
        rows.append({"model": name, **timed, "seconds": seconds[name]})
        if name == TRANSFORMER:
            rows[-1]["cache seconds"] = moved["cache"]
    return rows, made


def measure_growth(
    model: Any, name: str, tokens: Tensor, lengths: tuple[int, ...], options: argparse.Namespace, allowed: float
) -> tuple[dict[int, dict[str, float]], int]:
    """Times of a token of a fast weight model by length, one beside the other, and the rounds that were made."""
    ahead = tokens_ahead(options.rounds)
    generations = {f"{n}": generation_after(model, name, tokens, n - ahead) for n in lengths}
    take_ups: dict[str, Callable[[], Call]] = {n: lambda g=g: g.advance for n, g in generations.items()}
    seconds, made = time_tokens(take_ups, options.device, options.rounds, Budget(allowed))
    return {n: seconds[f"{n}"] for n in lengths}, made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--backend", default="auto", help="of the fast weight models (default: %(default)s)")
    parser.add_argument("--rules", type=list_of("rules", RULES), default=RULES, help=f"of {','.join(RULES)}")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the figure to this PNG")
    options = parser.parse_args()
    set_up(options)

    lengths, settings = LENGTHS, SETTINGS
    if options.quick:
        lengths, settings = QUICK_LENGTHS, QUICK_SETTINGS
        options.rounds = min(options.rounds, 2)
    ahead = tokens_ahead(options.rounds)
    if ahead >= min(lengths):
        most = max(rounds for rounds in range(options.rounds) if tokens_ahead(rounds) < min(lengths))
        parser.error(
            f"--rounds is {options.rounds}: it may be {most} at most, or the first stretch begins before the text"
        )
    budget = Budget(options.budget)
    models = {
        name: build(name, settings, options.backend, max(lengths) + ahead).to(options.device)
        for name in (TRANSFORMER, *options.rules)
    }
    shape = (settings["batch"], max(lengths) + ahead)
    tokens = torch.randint(4, settings["words"], shape, device=options.device)
    # All sizes come before all times, again for the sake of the memory that a cache finds.
    sizes = {
        (name, length): memory(model, name, tokens, length, options.device)
        for length in lengths
        for name, model in models.items()
    }
    generations = {name: generation_after(model, name, tokens, 1) for name, model in models.items()}
    rows: list[dict[str, Any]] = []
    parts = len(lengths) + len(options.rules)
    for number, length in enumerate(lengths):
        measured, made = measure_length(generations, length, options, budget.share(parts - number))
        rows += [row | sizes[row["model"], length] for row in measured]
        if made < options.rounds:
            budget.cut.append(f"after {length:,}: {made} rounds of {options.rounds}")
    generations.clear()  # and their caches
    for number, name in enumerate(options.rules):
        allowed = budget.share(len(options.rules) - number)
        growth, made = measure_growth(models[name], name, tokens, lengths, options, allowed)
        for row in rows:
            if row["model"] == name:
                row["seconds beside other lengths"] = growth[row["length"]]
        if made < options.rounds:
            budget.cut.append(f"{name}, its lengths in turns: {made} rounds of {options.rounds}")
    parameters = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    record = records.describe_run(
        "generation",
        options.device,
        settings=settings,
        backend=options.backend,
        parameters=parameters,
        cut=budget.cut,
        rows=rows,
    )
    print(render(record))
    print(targets.render(targets.evaluate_one(record)))
    if options.out is not None:
        records.write(record, options.out)
    if options.figure is not None:
        figures.draw_next_token(record, options.figure)


if __name__ == "__main__":
    main()
