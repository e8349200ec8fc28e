"""fairseq's commands for translation, with fast weights: train, go on, generate, interact, validate."""

import codecs
import io
import math
import re
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from tests.conftest import QUIET, command
from tests.tasks.conftest import TRANSLATION, generate, hypotheses_in, losses, slow, train_translation, weights

# Copies of weights that fairseq's own encoder layers keep for a fused kernel.
FUSED = re.compile(r"encoder\.layers\.\d+\.\w+_(weight|bias)$")


def assert_all_translated(found) -> None:
    """One line for every line of the test split, also for the one that is empty."""
    assert sorted(found) == list(range(12))
    for (hypothesis,) in found.values():
        assert math.isfinite(hypothesis.score)
        assert len(hypothesis.token_scores) > len(hypothesis.words)  # there is an end, and there may be a start


@pytest.mark.parametrize(
    "flags",
    [
        "--share-all-embeddings --update-rule gated --feature-map favor",
        slow(
            "--share-decoder-input-output-embed --decoder-normalize-before --encoder-normalize-before "
            "--encoder-learned-pos --decoder-learned-pos --layernorm-embedding --quant-noise-pq 0.1"
        ),
        slow(
            "--encoder-embed-dim 24 --decoder-embed-dim 16 --adaptive-softmax-cutoff 8,16 --criterion adaptive_loss "
            "--ddp-backend legacy_ddp --update-rule decay --feature-map relu"
        ),
        slow("--cross-self-attention --no-cross-attention --fast-weight-attention encoder"),
        slow("--fast-weight-attention cross"),
        slow("--encoder-layerdrop 0.5 --decoder-layerdrop 0.5 --encoder-layers 3 --decoder-layers 3"),
    ],
)
def test_fairseqs_options_train_and_translate(pairs, tmp_path, flags):
    joined = pairs.parent / "joined"
    assert len(losses(train_translation(joined, tmp_path, *flags.split()))) == 4
    path = tmp_path / "checkpoint_last.pt"
    found = generate(joined, path, tmp_path / "out")
    assert_all_translated(found)
    of_model = weights(path)
    shared = torch.equal(of_model["encoder.embed_tokens.weight"], of_model["decoder.embed_tokens.weight"])
    assert shared == ("--share-all-embeddings" in flags)
    if "layerdrop" in flags:
        kept = ["--model-overrides", str({"encoder_layers_to_keep": "0,2", "decoder_layers_to_keep": "1"})]
        pruned = generate(joined, path, tmp_path / "pruned", *kept)
        assert_all_translated(pruned)
        assert pruned[0][0].token_scores != found[0][0].token_scores


@pytest.mark.slow
def test_validation_translates(pairs, tmp_path):
    """With --eval-bleu a generator works in the midst of training, which goes on as without."""
    flags = ["--max-update", "8", "--feature-map", "favor", "--dropout", "0.1"]
    bleu = ["--eval-bleu", "--eval-bleu-detok", "space", "--eval-bleu-args", '{"beam": 4, "max_len_b": 10}']
    bleu += ["--best-checkpoint-metric", "bleu", "--maximize-best-checkpoint-metric"]
    log = train_translation(pairs, tmp_path / "bleu", *flags, *bleu, validate=True)
    assert len(re.findall(r'"valid_bleu": "[^"]+"', log)) == 2
    assert (tmp_path / "bleu" / "checkpoint_best.pt").exists()
    assert losses(log) == losses(train_translation(pairs, tmp_path / "plain", *flags))


@pytest.mark.slow
def test_an_interrupted_training_goes_on_as_if_nothing_had_been(pairs, tmp_path):
    common = """--update-rule delta --feature-map favor --attention-dropout 0.1 --dropout 0.2 --lr 0.01
        --lr-scheduler inverse_sqrt --warmup-updates 4""".split()
    learned = losses(train_translation(pairs, tmp_path / "whole", *common, "--max-update", "12"))
    assert sum(learned[-4:]) < sum(learned[:4]) - 1
    for updates in ("5", "12"):  # the first in the middle of an epoch
        log = train_translation(pairs, tmp_path / "cut", *common, "--max-update", updates)
    assert "Loaded checkpoint" in log and losses(log) == learned[5:]
    whole, cut = (weights(tmp_path / name / "checkpoint_last.pt") for name in ("whole", "cut"))
    assert whole.keys() == cut.keys()
    for name, x in whole.items():
        # fairseq's own encoder layers fill their copies of weights only in loading.
        assert FUSED.search(name) or torch.equal(x, cut[name]), name


def save_as_of_old(checkpoint: Path, path: Path, names: bool) -> Path:
    """A checkpoint as fairseq wrote it before version 0.10: all arguments in one Namespace, and no configuration.

    With `names` also one matrix for queries, keys and values, and none of the copies that came later.
    """
    state = torch.load(checkpoint, weights_only=True)
    # The model of a parser's arguments has all of them, as of old, except those that tasks and models set themselves.
    args = Namespace(**{**state["cfg"]["task"], **vars(state["cfg"]["model"])})
    weights = {name: x for name, x in state["model"].items() if not (names and FUSED.search(name))}
    for name in list(weights):
        start, _, kind = name.rpartition(".q_proj.")
        if start and names:
            parts = [weights.pop(f"{start}.{x}_proj.{kind}") for x in "qkv"]
            weights[f"{start}.in_proj_{kind}"] = torch.cat(parts)
    old = {key: value for key, value in state.items() if key != "cfg"}
    torch.save({**old, "args": args, "model": weights}, path)
    return path


@pytest.mark.parametrize("start", ["ours", slow("fairseq's"), slow("fairseq's of old")])
def test_training_starts_from_a_checkpoint_with_a_new_optimizer(pairs, translator, tmp_path, start):
    path = translator
    if start != "ours":
        train_translation(pairs, tmp_path, "--arch", "transformer_tiny")
        path = tmp_path / "checkpoint_last.pt"
    of_source = weights(path)
    if "old" in start:
        path = save_as_of_old(path, tmp_path / "old.pt", names=True)
    before = path.read_bytes()
    # An update of nearly nothing leaves the weights of the file as they are.
    flags = "--reset-optimizer --reset-lr-scheduler --reset-dataloader --reset-meters --max-update 1 --lr 1e-9".split()
    flags += "--update-rule delta --feature-map dpfp".split() if start == "ours" else []
    log = train_translation(pairs, tmp_path / "new", "--restore-file", str(path), *flags)
    assert "Loaded checkpoint" in log and len(losses(log)) == 1 and path.read_bytes() == before
    new = weights(tmp_path / "new" / "checkpoint_last.pt")
    for name in of_source.keys() & new.keys():
        assert torch.allclose(new[name], of_source[name], atol=1e-6), name
    # The result is a model of this project.
    assert_all_translated(generate(pairs, tmp_path / "new" / "checkpoint_last.pt", tmp_path / "out"))


@pytest.mark.slow
def test_translations_depend_on_neither_the_batch_nor_the_checkpoints_age(pairs, translator, tmp_path):
    expected, old = generate(pairs, translator, tmp_path / "out"), tmp_path / "old.pt"
    others = [generate(pairs, translator, tmp_path / size, "--batch-size", size) for size in ("1", "12")]
    others += [generate(pairs, save_as_of_old(translator, old, names), tmp_path / f"{names}") for names in (0, 1)]
    for other in others:
        assert other.keys() == expected.keys()
        for number, (hypothesis,) in expected.items():
            assert other[number][0].words == hypothesis.words
            assert other[number][0].token_scores == pytest.approx(hypothesis.token_scores, abs=2e-4)  # both are rounded


@pytest.mark.parametrize(("buffer", "batch"), [slow("1", "1"), ("10", "3")])
def test_interactive_translates_each_line(pairs, translator, tmp_path, capsys, buffer, batch):
    given = ["e1 e2 e3", "", "e4 ünïcödé 漢字 e5 \u2028 🙂", " ", "e6"]
    (tmp_path / "input").write_text("\n".join(given) + "\n", encoding="utf-8")
    flags = ["--max-len-b", "12", "--input", str(tmp_path / "input"), "--buffer-size", buffer, "--batch-size", batch]
    command("interactive", str(pairs), *TRANSLATION, *QUIET, "--path", str(translator), *flags)
    found = hypotheses_in(capsys.readouterr().out)
    assert sorted(found) == list(range(len(given)))
    assert all(math.isfinite(hypotheses[0].score) for hypotheses in found.values())
    # Without words there is nothing to tell two sources apart.
    assert found[1] == found[3] != found[0]


def test_interactive_skips_a_byte_order_mark_and_names_invalid_utf8(
    our_fairseq, pairs, translator, tmp_path, capsys, monkeypatch
):
    def translate(content: bytes, *flags: str) -> str:
        (tmp_path / "input").write_bytes(content)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), "latin-1"))
        capsys.readouterr()
        command("interactive", str(pairs), *TRANSLATION, *QUIET, "--path", str(translator), "--max-len-b", "2", *flags)
        return re.sub("(?m)^W-.*", "", capsys.readouterr().out)  # the time that it took

    text, names = "e1 e2 größer\n".encode(), {str(tmp_path / "input"): ["--input", str(tmp_path / "input")]}
    for name, flags in {**names, "standard input": []}.items():
        assert "S-0\te1 e2 " in translate(text, *flags) == translate(codecs.BOM_UTF8 + text, *flags)
        with pytest.raises(ValueError, match=f"^{name}, line 2: not UTF-8, byte 4 of the line is 0xff "):
            translate(text + b"e3 \xff\n", *flags)


def test_interactive_writes_soft_and_hard_alignments(our_fairseq, pairs, tmp_path, capsys):
    train_translation(pairs, tmp_path, "--arch", "transformer_tiny", "--max-update", "1")
    (tmp_path / "input").write_text("e1 e2 e3\n")
    flags = f"--path {tmp_path}/checkpoint_last.pt --input {tmp_path}/input --max-len-b 4 --print-alignment"
    alignments = []
    for kind in ("soft", "hard"):
        command("interactive", str(pairs), *TRANSLATION, *QUIET, *flags.split(), kind)
        alignments += re.findall(r"(?m)^A-0\t(.*)$", capsys.readouterr().out)
    soft, hard = alignments
    rows = [[float(x) for x in word.split(",")] for word in soft.split()]
    assert rows and all(len(row) == 4 and sum(row) == pytest.approx(1, abs=0.01) for row in rows)  # e1 e2 e3 </s>
    assert re.fullmatch(r"\d+-\d+( \d+-\d+)*", hard)


# What generation refuses of alignments is in tests/models/test_fast_weight_transformer.py.
def test_a_memory_does_not_learn_from_alignments(pairs, tmp_path):
    flags = "--load-alignments --label-smoothing 0.1 --criterion label_smoothed_cross_entropy_with_alignment"
    with pytest.raises(ValueError, match="load_alignments is True; it must be left out"):
        train_translation(pairs, tmp_path, *flags.split())
    assert not list(tmp_path.rglob("*.pt"))
