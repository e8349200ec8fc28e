"""Models of flash-linear-attention: a converted one is its source, gives its bits back, and trains."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fairseq_fastweights.conversion.__main__ import main
from tests.conftest import QUIET, TASK, binarise, command, evaluate
from tests.conversion import fla_models, llamas, sources

ATTENTION = {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "window_size": None}
CASES: dict[str, dict[str, Any]] = {
    "gated_deltanet": {"num_heads": 5, "expand_v": 0.5},  # heads that do not divide the width
    "gated_deltanet, shared keys, tied": {"num_heads": 2, "num_v_heads": 4, "conv_size": 3, "allow_neg_eigval": True}
    | {"expand_v": 1.5, "tie_word_embeddings": True, "attn": {"layers": [0], "num_heads": 3, "rope_theta": 99.0}},
    "kda": {"num_heads": 5, "expand_v": 0.5},
    "kda, shared keys": {"num_heads": 2, "num_v_heads": 4, "expand_v": 1, "conv_size": 3, "allow_neg_eigval": True},
    "delta_net": {"num_heads": 3},
    "delta_net, gated, attention": {"num_heads": 4, "expand_k": 0.5, "expand_v": 1.5, "use_gate": True, "conv_size": 3}
    | {"allow_neg_eigval": True, "attn": ATTENTION | {"qkv_bias": True}},
    "gla": {"num_heads": 3, "expand_k": 0.5},
    "gla, attention, joined": {
        "num_heads": 5,
        "expand_k": 1.25,
        "expand_v": 2.5,
        "fuse_norm": False,
        "attn": ATTENTION,
    },
    "retnet": {"num_heads": 3},
    "retnet, attention, tied": {"num_heads": 2, "expand_k": 0.5, "expand_v": 1, "fuse_norm": False, "attn": ATTENTION}
    | {"tie_word_embeddings": True},
}


@pytest.mark.parametrize("case", CASES)
def test_a_converted_model_is_its_source_and_gives_its_bits_back(case: str, tmp_path: Path) -> None:
    made = fla_models.make(tmp_path / "theirs", case.split(",")[0], CASES[case], joined="joined" in case)
    source = SimpleNamespace(config=SimpleNamespace(eos_token_id=1, vocab_size=fla_models.TYPES))
    sources.check_round_trip(tmp_path / "theirs", source, lambda tokens: fla_models.logits(*made, tokens), 1e-5)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text in the numbers of the tokenizer."""
    folder = tmp_path_factory.mktemp("data")
    line = " ".join(map(str, llamas.tokenizer().encode(llamas.TEXT).ids))
    for split in ("train", "valid"):
        (folder / f"{split}.txt").write_text(f"{line}\n" * 4)
    (folder / "dict.txt").write_text("".join(f"{i} 1\n" for i in range(fla_models.TYPES) if i != 1))
    return binarise(folder, "--srcdict", str(folder / "dict.txt"))


@pytest.mark.parametrize("kind", ["delta_net", "gla", "retnet"])
def test_a_converted_model_trains_and_scores_with_carried_states(kind: str, data: Path, tmp_path: Path) -> None:
    fla_models.make(tmp_path / "theirs", kind, CASES[kind])
    assert main(["from-huggingface", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    flags = [*TASK, *QUIET, "--finetune-from-model", str(tmp_path / "ours" / "model.pt"), "--save-dir", str(tmp_path)]
    flags += (tmp_path / "ours" / "options.txt").read_text().split()
    flags += "--optimizer adam --lr 0.003 --tokens-per-sample 16 --batch-size 4 --max-update 4".split()
    log = command("train", str(data), *flags, "--disable-validation")
    losses = [float(loss) for loss in re.findall(r'"loss": "([^"]+)"', log)]
    assert len(losses) == 4 and all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    carried = ["--gen-subset", "valid", "--carry-over-state", "--batch-size", "1", "--tokens-per-sample"]
    last = tmp_path / "checkpoint_last.pt"
    (whole, count), (parts, same) = (evaluate(data, last, *carried, length) for length in ("200", "7"))
    assert count == same and parts == pytest.approx(whole, abs=1e-4)
