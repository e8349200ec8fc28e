"""Settings are read and never run: a checkpoint may be anybody's."""

from argparse import Namespace

import pytest
import torch
from fairseq import checkpoint_utils, tasks
from fairseq.data import Dictionary

literal = pytest.importorskip("fairseq.settings", reason="needs tools/build_fairseq.py's fairseq").literal


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("(0.9, 0.98)", (0.9, 0.98)),
        (" {'beam': -1, 'x': [None, True]} ", {"beam": -1, "x": [None, True]}),
        ("[(512, 3)] * 2 + [(8, 1 + 2 - 4)]", [(512, 3), (512, 3), (8, -1)]),
        ("2 * 'ab'", "abab"),
        ("[" + "1," * 200_000 + "]", [1] * 200_000),  # a text of its own size may be long
    ],
    ids=range(5),
)
def test_literals_sums_and_products_are_read(text, value):
    assert literal(text) == value


@pytest.mark.parametrize(
    "text",
    ["__import__('os')", "x", "[0] * 10**9", "[0] * 1000 * 1000", "1000000 * 'a'", "{**{}}", "(lambda: 1)()", "[",
     "[[[0] * 99] * 99] * 99", "('ab' * 999,) * 999", "('a' * 99_999) + ('a' * 99_999)",
     "[" + "'a' * 9_999, " * 99 + "]", "[{1: [2, 3], 4: {5}}] * 9_999", "1 + [1]", "[x for x in (1,)]",
     "(" * 5000, "f'{1}'", "1 / 2"],
)  # fmt: skip
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError, match="is no literal"):
        literal(text)
    with pytest.raises(TypeError, match="a setting must be a string, not list"):  # as eval refuses it
        literal([text])


@pytest.mark.parametrize(
    ("arch", "setting"),
    [("transformer_lm", "character_filters"), ("fconv_lm", "decoder_layers"), ("fconv_lm", "decoder_attention")],
)
def test_a_checkpoint_that_loads_runs_nothing(tmp_path, arch, setting):
    Dictionary().save(str(tmp_path / "dict.txt"))
    task = tasks.setup_task(Namespace(task="language_modeling", data=str(tmp_path), tokens_per_sample=8))
    marker = tmp_path / "ran"
    args = Namespace(arch=arch, task="language_modeling", data=str(tmp_path), character_embeddings=True)
    setattr(args, setting, f"__import__('pathlib').Path({str(marker)!r}).touch()")
    history = {"criterion_name": "CrossEntropyCriterion", "optimizer_name": "FairseqAdam", "lr_scheduler_state": {}}
    state = {"args": args, "model": {}, "optimizer_history": [history | {"num_updates": 0}]}
    torch.save(state | {"extra_state": {"train_iterator": {"epoch": 1}}}, tmp_path / "model.pt")
    with pytest.raises(ValueError, match="is no literal"):
        checkpoint_utils.load_model_ensemble([str(tmp_path / "model.pt")], task=task)
    assert not marker.exists()
