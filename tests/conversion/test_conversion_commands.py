"""fairseq's commands take a converted folder: they score, continue and train as the source would."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from fairseq_fastweights.conversion.__main__ import main
from fairseq_fastweights.conversion.weight_files import WeightFiles
from tests.conftest import QUIET, TASK, binarise, command, evaluate, train
from tests.conversion import sources
from tests.conversion.test_tokenizer import byte_level
from tests.models.test_checkpoints import with_former_name

LINES = ["the cat sat on the mat", "and  the other cats   sat there,", "Grüße: that is the theme 🎉", "x"]


class Converted(NamedTuple):
    source: Any
    tokenizer: Any
    theirs: Path
    ours: Path


@pytest.fixture(scope="module", params=["gpt2", "neox"])
def converted(request, tmp_path_factory) -> Converted:
    """A source of the sizes that `train` asks for, and what was made of it."""
    from tokenizers import Tokenizer

    folder = tmp_path_factory.mktemp(request.param)
    theirs, ours = folder / "theirs", folder / "ours"
    if request.param == "gpt2":
        source = sources.model(False, n_embd=32, n_inner=32, n_head=2, n_positions=64)
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 32, "max_position_embeddings": 64}
        source = sources.model(True, tie_word_embeddings=True, **sizes)
    sources.save(theirs, source)
    assert main(["from-huggingface", str(theirs), str(ours)]) == 0
    return Converted(source, Tokenizer.from_file(str(theirs / "tokenizer.json")), theirs, ours)


@pytest.fixture(scope="module")
def data(converted, tmp_path_factory) -> Path:
    """The lines, encoded by the folder's tokenizer and binarised with its dictionary."""
    folder = tmp_path_factory.mktemp("data")
    bpe = byte_level(converted.ours)
    for split in ("train", "valid", "test"):
        (folder / f"{split}.txt").write_text("".join(bpe.encode(line) + "\n" for line in LINES))
    return binarise(folder, "--srcdict", str(converted.ours / "dict.txt"))


@pytest.mark.slow
@torch.no_grad()
def test_eval_lm_gives_the_sources_perplexity(converted, data):
    end, losses = converted.source.config.eos_token_id, []
    for line in LINES:
        tokens = torch.tensor([[end, *converted.tokenizer.encode(line).ids, end]])
        log_probabilities = converted.source(tokens[:, :-1]).logits.double().log_softmax(-1)
        losses.append(-log_probabilities.gather(-1, tokens[:, 1:, None]).flatten())
    expected = torch.cat(losses)
    flags = ["--sample-break-mode", "eos", "--tokens-per-sample", "64", "--batch-size", "2"]
    loss, tokens = evaluate(data, converted.ours / "model.pt", *flags)
    assert tokens == len(expected)
    # float32, with another order of sums.
    assert 2**loss == pytest.approx(expected.mean().exp().item(), rel=1e-5)


@torch.no_grad()
def test_interactive_continues_a_text_as_the_source_does(converted, monkeypatch, capsys):
    source, tokenizer, _, ours = converted
    end, prompts = source.config.eos_token_id, ["the cat", "and the other"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{prompt}\n" for prompt in prompts)))
    flags = ["--path", str(ours / "model.pt"), "--beam", "1", "--max-len-a", "0", "--max-len-b", "30"]
    command("interactive", str(ours), *TASK, *QUIET, *flags, "--bpe", "byte_level", "--byte-level-folder", str(ours))
    printed = dict(re.findall(r"^D-(\d)\t\S+\t(.*)$", capsys.readouterr().out, flags=re.MULTILINE))
    for i, prompt in enumerate(prompts):
        tokens = [end, *tokenizer.encode(prompt).ids]
        while len(tokens) <= 30 and tokens[-1] != end:
            tokens.append(int(source(torch.tensor([tokens])).logits[0, -1].argmax()))
        words = byte_level(ours).decode(" ".join(str(n) for n in tokens[1:] if n != end))
        assert printed[str(i)].split() == words.split() and words.startswith(prompt)


@pytest.mark.slow
@pytest.mark.parametrize(("lr", "same"), [("0", True), ("0.01", False)])
def test_training_starts_from_it_and_what_comes_out_converts_back(converted, data, tmp_path, lr, same):
    neox = converted.source.config.model_type == "gpt_neox"
    flags = ["--arch", f"fast_weight_lm_{'pythia_70m' if neox else 'gpt2_small'}", "--softmax-attention-layers", "all"]
    flags += ["--rotary-dim", "4"] if neox else []
    flags += ["--restore-file" if neox else "--finetune-from-model", str(converted.ours / "model.pt")]
    log = train(data, tmp_path, *flags, "--max-target-positions", "64", "--max-update", "2", "--lr", lr)
    assert math.isfinite(float(re.findall(r'"train_loss": "([^"]+)"', log)[-1]))
    last = str(tmp_path / "checkpoint_last.pt")
    assert main(["to-huggingface", str(converted.ours), str(tmp_path / "back"), "--checkpoint", last]) == 0
    before, after = WeightFiles(converted.theirs), WeightFiles(tmp_path / "back")
    assert set(before.shapes) == set(after.shapes)
    assert all(torch.equal(before.read(n), after.read(n)) for n in before.shapes) is same


def test_checkpoints_of_other_types_and_of_former_names_convert_back_but_no_other_mixers(converted, tmp_path, capsys):
    import transformers

    state = torch.load(converted.ours / "model.pt", weights_only=True)
    half = {n: w.half() if w.is_floating_point() else w for n, w in state["model"].items()}
    state["model"] = with_former_name(half)
    torch.save(state, tmp_path / "former.pt")
    back = ["to-huggingface", str(converted.ours), str(tmp_path / "back"), "--checkpoint", str(tmp_path / "former.pt")]
    assert main(back) == 0, capsys.readouterr().err
    before, after = WeightFiles(converted.theirs), WeightFiles(tmp_path / "back")
    assert all(torch.equal(before.read(n).half(), after.read(n)) for n in before.shapes)
    assert transformers.AutoConfig.from_pretrained(tmp_path / "back").dtype == torch.float16
    # As of a model that was trained with fast weights.
    settings = json.loads(bytes(state["model"]["decoder.settings"].tolist())) | {"mixers": "delta"}
    state["model"]["decoder.settings"] = torch.tensor(list(json.dumps(settings).encode()))
    torch.save(state, tmp_path / "former.pt")
    back[2] = str(tmp_path / "refused")
    assert main(back) == 2
    assert "mixers is 'delta' in the checkpoint and 'softmax' in the model" in capsys.readouterr().err
    assert not (tmp_path / "refused").exists()
