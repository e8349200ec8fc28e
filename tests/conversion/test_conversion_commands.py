"""fairseq's commands take a converted folder: they score, continue and train as the source would."""

import io
import json
import math
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from fairseq_fastweights.conversion.__main__ import main
from fairseq_fastweights.conversion.files.weight_files import WeightFiles
from tests.conftest import QUIET, TASK, binarise, command, train
from tests.conversion import sources
from tests.conversion.test_tokenizer import whole
from tests.tasks.conftest import losses as losses_in

LINES = ["the cat sat on the mat", "and  the other cats   sat there,", "Grüße: that is the theme 🎉", "x"]


@pytest.fixture(scope="module", params=["gpt2", "neox"])
def converted(request, tmp_path_factory) -> SimpleNamespace:
    """A folder with the sizes that `train` asks for, the converted one, and `LINES`, binarised with it."""
    folder, neox = tmp_path_factory.mktemp(request.param), request.param == "neox"
    theirs, ours = folder / "theirs", folder / "ours"
    sizes = {"n_embd": 32, "n_inner": 32, "n_head": 2, "n_positions": 64}
    if neox:
        sizes = {"hidden_size": 32, "intermediate_size": 32, "max_position_embeddings": 64, "tie_word_embeddings": True}
    source = sources.model(neox, **sizes)
    sources.save(theirs, source)
    assert main(["from-huggingface", str(theirs), str(ours)]) == 0
    for split in ("train", "valid", "test"):
        (folder / f"{split}.txt").write_text("".join(whole(ours).encode(line) + "\n" for line in LINES))
    data = binarise(folder, "--srcdict", str(ours / "dict.txt"))
    return SimpleNamespace(source=source, words=sources.tokenizer(neox), theirs=theirs, ours=ours, data=data, neox=neox)


@torch.no_grad()
def test_interactive_continues_a_text_as_the_source_does(converted, monkeypatch, capsys):
    source, ours = converted.source, converted.ours
    end, prompts = source.config.eos_token_id, ["the cat", "and the other"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{prompt}\n" for prompt in prompts)))
    flags = ["--path", str(ours / "model.pt"), "--beam", "1", "--max-len-a", "0", "--max-len-b", "30"]
    command(
        "interactive", str(ours), *TASK, *QUIET, *flags, "--bpe", "tokenizer_json", "--tokenizer-json-folder", str(ours)
    )
    printed = dict(re.findall(r"^D-(\d)\t\S+\t(.*)$", capsys.readouterr().out, flags=re.MULTILINE))
    for i, prompt in enumerate(prompts):
        tokens = [end, *converted.words.encode(prompt).ids]
        while len(tokens) <= 30 and tokens[-1] != end:
            tokens.append(int(source(torch.tensor([tokens])).logits[0, -1].argmax()))
        words = whole(ours).decode(" ".join(str(n) for n in tokens[1:] if n != end))
        assert printed[str(i)].split() == words.split() and words.startswith(prompt)


@pytest.mark.slow
@pytest.mark.parametrize(("lr", "same"), [("0", True), ("0.01", False)])
def test_training_starts_at_the_sources_perplexity_and_converts_back(converted, tmp_path, lr, same):
    end, losses = converted.source.config.eos_token_id, []
    for line in LINES:
        tokens = torch.tensor([[end, *converted.words.encode(line).ids, end]])
        scores = converted.source(tokens[:, :-1]).logits.detach().log_softmax(-1)
        losses += scores.gather(-1, tokens[:, 1:, None]).neg().flatten().tolist()
    flags = ["--arch", "fast_weight_lm_gpt2_small", "--finetune-from-model"]
    if converted.neox:
        flags = ["--rotary-dim", "4", "--arch", "fast_weight_lm_pythia_70m", "--restore-file"]
    flags += [str(converted.ours / "model.pt"), "--softmax-attention-layers", "all"]
    flags += "--attention-dropout 0 --sample-break-mode eos --tokens-per-sample 64 --max-target-positions 64".split()
    # All lines are one batch. fairseq's losses are in bits, with three decimals.
    log = train(converted.data, tmp_path, *flags, "--max-update", "2", "--lr", lr)
    first, second = losses_in(log, "train_loss")
    assert first == pytest.approx(sum(losses) / len(losses) / math.log(2), abs=1e-3) and (first == second) is same
    last = str(tmp_path / "checkpoint_last.pt")
    assert main(["to-huggingface", str(converted.ours), str(tmp_path / "back"), "--checkpoint", last]) == 0
    before, after = WeightFiles(converted.theirs), WeightFiles(tmp_path / "back")
    assert set(before.shapes) == set(after.shapes)
    assert all(torch.equal(before.read(n), after.read(n)) for n in before.shapes) is same


def test_other_types_convert_back_but_no_other_mixers(converted, tmp_path, capsys):
    import transformers

    state = torch.load(converted.ours / "model.pt", weights_only=True)
    state["model"] = {n: w.half() if w.is_floating_point() else w for n, w in state["model"].items()}
    torch.save(state, tmp_path / "half.pt")
    back = ["to-huggingface", str(converted.ours), str(tmp_path / "back"), "--checkpoint", str(tmp_path / "half.pt")]
    assert main(back) == 0, capsys.readouterr().err
    before, after = WeightFiles(converted.theirs), WeightFiles(tmp_path / "back")
    assert all(torch.equal(before.read(n).half(), after.read(n)) for n in before.shapes)
    assert transformers.AutoConfig.from_pretrained(tmp_path / "back").dtype == torch.float16
    # As of a model that was trained with fast weights.
    settings = json.loads(bytes(state["model"]["decoder.settings_version"].tolist())) | {"mixers": "delta"}
    state["model"]["decoder.settings_version"] = torch.tensor(list(json.dumps(settings).encode()))
    torch.save(state, tmp_path / "half.pt")
    back[2] = str(tmp_path / "refused")
    assert main(back) == 2 and not (tmp_path / "refused").exists()
    assert "mixers is 'delta' in the checkpoint and 'softmax' in the model" in capsys.readouterr().err


@pytest.mark.slow
def test_both_commands_run_in_processes_of_their_own(converted, tmp_path):
    for command_, source, target in (("from", converted.theirs, "ours"), ("to", tmp_path / "ours", "back")):
        words = [f"{command_}-huggingface", str(source), str(tmp_path / target)]
        subprocess.run([sys.executable, "-m", "fairseq_fastweights.conversion", *words], check=True)
    assert (tmp_path / "ours" / "options.txt").read_bytes() == (converted.ours / "options.txt").read_bytes()
    assert (tmp_path / "back" / "config.json").read_bytes() == (converted.theirs / "config.json").read_bytes()
