"""fairseq's commands take a converted folder: they score, continue and train as the source would."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch

from fairseq_fastweights.conversion.__main__ import main
from fairseq_fastweights.conversion.weight_files import WeightFiles
from tests.conftest import QUIET, TASK, binarise, command, evaluate, train
from tests.conversion import sources
from tests.conversion.test_tokenizer import byte_level
from tests.models.test_checkpoints import with_former_name

LINES = ["the cat sat on the mat", "and  the other cats   sat there,", "Grüße: that is the theme 🎉", "x"]


@pytest.fixture(scope="module", params=["gpt2", "neox"])
def converted(request, tmp_path_factory) -> tuple[torch.nn.Module, Path, Path]:
    """A source of the sizes that `train` asks for, its folder and what was made of it."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "gpt2":
        source = sources.model(False, n_embd=32, n_inner=32, n_head=2, n_positions=64)
    else:
        source = sources.model(True, hidden_size=32, intermediate_size=32, max_position_embeddings=64)
    sources.save(folder / "theirs", source)
    assert main(["from-huggingface", str(folder / "theirs"), str(folder / "ours")]) == 0
    return source, folder / "theirs", folder / "ours"


@pytest.fixture(scope="module")
def data(converted, tmp_path_factory) -> Path:
    """The lines, encoded by the folder's tokenizer and binarised with its dictionary."""
    folder = tmp_path_factory.mktemp("data")
    bpe = byte_level(converted[2])
    for split in ("train", "valid", "test"):
        (folder / f"{split}.txt").write_text("".join(bpe.encode(line) + "\n" for line in LINES))
    return binarise(folder, "--srcdict", str(converted[2] / "dict.txt"))


@pytest.mark.slow
@torch.no_grad()
def test_eval_lm_gives_the_sources_perplexity(converted, data):
    source, theirs, ours = converted
    from tokenizers import Tokenizer

    real, end = Tokenizer.from_file(str(theirs / "tokenizer.json")), source.config.eos_token_id
    losses = []
    for line in LINES:
        tokens = torch.tensor([[end, *real.encode(line).ids, end]])
        log_probabilities = source(tokens[:, :-1]).logits.double().log_softmax(-1)
        losses.append(-log_probabilities.gather(-1, tokens[:, 1:, None]).flatten())
    expected = torch.cat(losses)
    flags = ["--sample-break-mode", "eos", "--tokens-per-sample", "64", "--batch-size", "2"]
    loss, tokens = evaluate(data, ours / "model.pt", *flags)
    assert tokens == len(expected)
    # float32, with another order of sums.
    assert 2**loss == pytest.approx(expected.mean().exp().item(), rel=1e-5)


@torch.no_grad()
def test_interactive_continues_a_text_as_the_source_does(converted, monkeypatch, capsys):
    source, theirs, ours = converted
    from tokenizers import Tokenizer

    real, end = Tokenizer.from_file(str(theirs / "tokenizer.json")), source.config.eos_token_id
    prompts = ["the cat", "and the other"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{prompt}\n" for prompt in prompts)))
    flags = ["--path", str(ours / "model.pt"), "--beam", "1", "--max-len-a", "0", "--max-len-b", "30"]
    bpe = ["--bpe", "byte_level", "--byte-level-folder", str(ours)]
    command("interactive", str(ours), *TASK, *QUIET, *flags, *bpe)
    printed = dict(re.findall(r"^D-(\d)\t\S+\t(.*)$", capsys.readouterr().out, flags=re.MULTILINE))
    numbers = re.compile(r"\s+")
    for i, prompt in enumerate(prompts):
        tokens = [end, *real.encode(prompt).ids]
        while len(tokens) <= 30 and (len(tokens) < 2 or tokens[-1] != end):
            tokens.append(int(source(torch.tensor([tokens])).logits[0, -1].argmax()))
        words = byte_level(ours).decode(" ".join(str(n) for n in tokens[1:] if n != end))
        assert numbers.sub(" ", printed[str(i)]).strip().startswith(prompt)
        assert numbers.sub(" ", printed[str(i)]).strip() == numbers.sub(" ", words).strip()


@pytest.mark.slow
def test_training_starts_from_it_and_what_comes_out_converts_back(converted, data, tmp_path, capsys):
    source, theirs, ours = converted
    neox = source.config.model_type == "gpt_neox"
    arch = f"fast_weight_lm_{'pythia_70m' if neox else 'gpt2_small'}"
    way = "--restore-file" if neox else "--finetune-from-model"
    flags = ["--arch", arch, "--softmax-attention-layers", "all", "--decoder-attention-heads", "2"]
    flags += ["--max-target-positions", "64", way, str(ours / "model.pt"), "--max-update", "2"]
    if neox:
        flags += ["--rotary-dim", "4"]
    for lr, same in (("0", True), ("0.01", False)):
        folder = tmp_path / lr
        log = plain_train(data, folder, neox, *flags, "--lr", lr)
        assert math.isfinite(float(re.findall(r'"train_loss": "([^"]+)"', log)[-1]))
        back = tmp_path / f"back {lr}"
        last = folder / "checkpoint_last.pt"
        assert main(["to-huggingface", str(ours), str(back), "--checkpoint", str(last)]) == 0
        before, after = WeightFiles(theirs), WeightFiles(back)
        assert set(before.shapes) == set(after.shapes)
        assert all(torch.equal(before.read(n), after.read(n)) for n in before.shapes) is same


def plain_train(data: Path, folder: Path, neox: bool, *flags: str) -> str:
    """`train`, which shares embeddings; Pythia does not."""
    if not neox:
        return train(data, folder, *flags)
    sizes = "--decoder-layers 2 --decoder-embed-dim 32 --decoder-ffn-embed-dim 32 --dropout 0 --optimizer adam"
    others = "--tokens-per-sample 16 --batch-size 4 --disable-validation"
    return command(
        "train", str(data), *TASK, *QUIET, *sizes.split(), *others.split(), "--save-dir", str(folder), *flags
    )


@pytest.mark.slow
def test_a_checkpoint_with_fast_weights_has_no_way_back(converted, data, tmp_path, capsys):
    source, _, ours = converted
    neox = source.config.model_type == "gpt_neox"
    arch = ["--arch", f"fast_weight_lm_{'pythia_70m' if neox else 'gpt2_small'}", "--decoder-attention-heads", "2"]
    arch += ["--max-target-positions", "64", "--update-rule", "sum"]
    plain_train(data, tmp_path / "run", neox, *arch, "--max-update", "1", "--lr", "0.01")
    last = tmp_path / "run" / "checkpoint_last.pt"
    assert main(["to-huggingface", str(ours), str(tmp_path / "back"), "--checkpoint", str(last)]) == 2
    error = capsys.readouterr().err
    assert "mixers is 'sum' in the checkpoint and 'softmax' in the model" in error
    assert not (tmp_path / "back").exists()


def test_a_model_trained_in_another_type_says_so(converted, tmp_path):
    _, _, ours = converted
    state = torch.load(ours / "model.pt", weights_only=True)
    state["model"] = {n: w.half() if w.is_floating_point() else w for n, w in state["model"].items()}
    torch.save(state, tmp_path / "half.pt")
    assert main(["to-huggingface", str(ours), str(tmp_path / "back"), "--checkpoint", str(tmp_path / "half.pt")]) == 0
    import transformers

    assert transformers.AutoConfig.from_pretrained(tmp_path / "back").dtype == torch.float16


def test_a_checkpoint_with_the_former_name_of_its_settings_converts_back(converted, tmp_path, capsys):
    _, theirs, ours = converted
    state = torch.load(ours / "model.pt", weights_only=True)
    state["model"] = with_former_name(state["model"])
    torch.save(state, tmp_path / "former.pt")
    back = ["to-huggingface", str(ours), str(tmp_path / "back"), "--checkpoint", str(tmp_path / "former.pt")]
    assert main(back) == 0, capsys.readouterr().err
    before, after = WeightFiles(theirs), WeightFiles(tmp_path / "back")
    assert all(torch.equal(before.read(n), after.read(n)) for n in before.shapes)
    settings = json.loads(bytes(state["model"]["decoder.settings"].tolist())) | {"mixers": "delta"}
    state["model"]["decoder.settings"] = torch.tensor(list(json.dumps(settings).encode()))
    torch.save(state, tmp_path / "former.pt")
    back[2] = str(tmp_path / "refused")
    assert main(back) == 2
    assert "mixers is 'delta' in the checkpoint and 'softmax' in the model" in capsys.readouterr().err
