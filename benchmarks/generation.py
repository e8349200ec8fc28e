"""The next token, by how many there are before it: Figure 1 of Mao (2022), with fairseq's Transformer for attention.

Models of one size, one step of `fairseq-generate`'s kind: a forward pass in evaluation mode for the last token of every
row, with fairseq's incremental state, output layer included. The Transformer's state is its key-value cache, filled
with random keys and values of the given length; a fast weight model's has the size that it has after any token.

    python benchmarks/generation.py [--out results.json] [--figure figure.png]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import figures, records, targets
from harness.measuring import add_options, list_of, set_up
from harness.memory import held, peak
from harness.models import build_language_model
from harness.next_token_tables import render
from harness.timing import Budget, clock_for, first_calls, synchronizer, time_in_turns

TRANSFORMER = "transformer"
RULES = ("delta", "decay", "sum")
LENGTHS = (1, 250, 500, 1000, 2000, 4000)
SETTINGS = {"layers": 6, "width": 512, "heads": 8, "feed-forward": 2048, "words": 10_000, "batch": 8}
QUICK_SETTINGS = {"layers": 1, "width": 16, "heads": 2, "feed-forward": 16, "words": 20, "batch": 2}


def build(name: str, settings: dict[str, int], backend: str, longest: int) -> Any:
    """fairseq's Transformer language model, or the fast weight model with that rule."""
    width = str(settings["width"])
    flags = ["--decoder-layers", str(settings["layers"]), "--decoder-attention-heads", str(settings["heads"])]
    for what in ("embed", "input", "output"):
        flags += [f"--decoder-{what}-dim", width]
    flags += ["--decoder-ffn-embed-dim", str(settings["feed-forward"]), "--share-decoder-input-output-embed"]
    flags += ["--tokens-per-sample", str(longest + 1), "--max-target-positions", str(longest + 1)]
    if name == TRANSFORMER:
        return build_language_model("transformer_lm", flags, settings["words"])
    flags += ["--update-rule", name, "--fast-weight-backend", backend]
    return build_language_model("fast_weight_lm", flags, settings["words"])


def state_after(model: Any, name: str, tokens: torch.Tensor) -> dict[str, Any]:
    """An incremental state as it is after all these tokens but the last."""
    state: dict[str, Any] = {}
    batch, length = tokens.shape[0], tokens.shape[1] - 1
    if name != TRANSFORMER:
        model(tokens[:, :1], incremental_state=state)
        return state
    for layer in model.decoder.layers:
        attention = layer.self_attn
        shape = (batch, attention.num_heads, length, attention.head_dim)
        cache = {what: torch.randn(shape, device=tokens.device) for what in ("prev_key", "prev_value")}
        attention._set_input_buffer(state, {**cache, "prev_key_padding_mask": None})
    return state


def next_token(model: Any, tokens: torch.Tensor, state: dict[str, Any]) -> Callable[[], Any]:
    """A call that computes the next token's logits from a state, and gives back the logits and the state after them.

    Fast weights may be updated in place: their values are then those of a later token, which changes no time.
    """

    def call() -> Any:
        with torch.no_grad():
            after = {key: dict(buffer) for key, buffer in state.items()}
            return model(tokens, incremental_state=after)[0], after

    return call


def peak_memory(model: Any, name: str, tokens: torch.Tensor, device: str) -> int:
    """The most bytes that the state and the tensors of one more token take at a time.

    The state is the call's own: a cache that has been replaced by a longer one is gone, as it is in generation.
    """
    with torch.no_grad():
        return peak(
            lambda: state_after(model, name, tokens),
            lambda state: model(tokens, incremental_state=state)[0],
            device,
        )


def measure(
    models: dict[str, Any], lengths: tuple[int, ...], settings: dict[str, int], options: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[str]]:
    """A row for each model and length, and what was cut. All models at all lengths take turns."""
    budget = Budget(options.budget)
    wait = synchronizer(options.device)
    calls: dict[str, Callable[[], Any]] = {}
    warm: dict[str, float] = {}
    rows: dict[str, dict[str, Any]] = {}
    for length in lengths:
        tokens = torch.randint(4, settings["words"], (settings["batch"], length + 1), device=options.device)
        for name, model in models.items():
            key = f"{name} {length}"
            memory = peak_memory(model, name, tokens, options.device)
            with torch.no_grad():
                state = state_after(model, name, tokens)
            calls[key] = next_token(model, tokens, state)
            warm[key] = first_calls(calls[key], wait)[1]
            rows[key] = {"model": name, "length": length, "state bytes": held(state), "peak bytes": memory}
    allowed = max(0.0, budget.left)
    seconds, made = time_in_turns(calls, warm, clock_for(options.device), rounds=options.rounds, allowed=allowed)
    if made < options.rounds:
        budget.cut.append(f"{made} rounds of {options.rounds}")
    return [row | {"seconds": seconds[key]} for key, row in rows.items()], budget.cut


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
        lengths, settings = (1, 8), QUICK_SETTINGS
        options.rounds = min(options.rounds, 2)
    models = {
        name: build(name, settings, options.backend, max(lengths)).to(options.device)
        for name in (TRANSFORMER, *options.rules)
    }
    rows, cut = measure(models, lengths, settings, options)
    parameters = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    record = records.describe_run(
        "generation",
        options.device,
        settings=settings,
        backend=options.backend,
        parameters=parameters,
        cut=cut,
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
