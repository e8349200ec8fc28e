"""fairseq_fastweights.lm_eval: a checkpoint of fairseq's scores as lm_eval's own model does, and longer texts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from fairseq_fastweights.conversion.__main__ import main as convert
from fairseq_fastweights.files import integrity
from fairseq_fastweights.lm_eval import model
from fairseq_fastweights.lm_eval.__main__ import main
from fairseq_fastweights.lm_eval.model import UNLIMITED, FastWeightLM
from tests.conftest import train
from tests.conversion import llamas, sources

MODELS = {
    "delta": "--update-rule delta --no-token-positional-embeddings",
    "positions": "--update-rule sum",
    "hybrid": "--mixers gated:1,softmax:2 --no-token-positional-embeddings",
    "linformer": "--mixers linformer --no-token-positional-embeddings",
    "local": "--mixers local --no-token-positional-embeddings",
}
LIMITED = {"positions", "hybrid", "linformer"}
CONTINUATIONS = [
    ("w1 w2 w3", " w4"),
    ("w1 w2 w3", " w5"),  # in the same row as the one before
    ("w1 w2", " w3 w4"),  # and this
    ("", "w7 w8"),
    ("w9", " w9 w9 w9 w1"),
    ("w3 w3 w2 w7 w8 w9 w10 w11", " w1"),
]
TEXTS = ["w1 w2 w3 w4 w5 w6", "", "w1", "w5 w6 w7"]


@pytest.fixture(scope="session")
def checkpoint(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`checkpoint(name)`: of a model of `MODELS` after three updates, for texts of 16 tokens."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def make(name: str) -> Path:
        if not (folder / name).exists():
            train(corpus, folder / name, *MODELS[name].split(), "--max-update", "3", "--lr", "0.1")
        return folder / name / "checkpoint_last.pt"

    return make


def requests(kind: str, arguments: list[Any]) -> list[Instance]:
    return [Instance(kind, {}, args, number) for number, args in enumerate(arguments)]


def read_alone(lm: FastWeightLM, words: list[int], scored: int) -> float:
    """The log-probability of a text's last words, of the model's own logits."""
    if not scored:
        return 0.0
    with torch.no_grad():
        logits = lm.model(torch.tensor([words[:-1]])).logits[0].log_softmax(-1)
    return sum(logits[t - 1, words[t]].item() for t in range(len(words) - scored, len(words)))


@pytest.mark.parametrize(
    "options", [{"batch_size": 1}, {"batch_size": 2, "segment": 3}, {"batch_size": "auto"}], ids=str
)
def test_scores_are_those_of_lm_evals_own_model(options: dict[str, Any], checkpoint, tmp_path) -> None:
    for name in ("delta", "hybrid"):
        ours = FastWeightLM(str(checkpoint(name)), device="cpu", **options)
        # Without its cache, which takes the wrong position where continuations of one row differ in length.
        assert convert(["to-huggingface", str(checkpoint(name)), str(tmp_path / name)]) == 0
        theirs = HFLM(str(tmp_path / name), device="cpu", batch_size=1, max_length=16, logits_cache=False)
        scores, expected = (lm.loglikelihood(requests("loglikelihood", CONTINUATIONS)) for lm in (ours, theirs))
        assert [score for score, _ in scores] == pytest.approx([score for score, _ in expected], abs=1e-5)
        assert [greedy for _, greedy in scores] == [greedy for _, greedy in expected]
        texts = requests("loglikelihood_rolling", [(text,) for text in TEXTS])
        rolled, expected = (lm.loglikelihood_rolling(texts) for lm in (ours, theirs))
        assert rolled == pytest.approx(expected, abs=1e-5)
        ends = [[2, *ours.tok_encode(text)] for text in TEXTS]  # as lm_eval has it, with one end of a text too many
        assert rolled == pytest.approx([read_alone(ours, words, len(words) - 1) for words in ends], abs=1e-5)
        until = [(text, {"until": ["w0"], "max_gen_toks": 4}) for text in ("w1 w2 w3", "w4", "w1 w2")]
        generated, wanted = (lm.generate_until(requests("generate_until", until)) for lm in (ours, theirs))
        assert generated == wanted


CONTINUED = [("the cat", " sat"), ("the cat", " on the mat"), ("", " the theme")]


@pytest.mark.parametrize("kind", ["gpt2", "neox", "Llama", "Qwen2"])
def test_a_converted_model_scores_as_lm_evals_own_model_of_its_folder(kind, tmp_path) -> None:
    """With the source's beginning of texts, or none, whatever the option says of it; and with its penalties."""
    if kind in ("gpt2", "neox"):
        sources.save(tmp_path / "theirs", sources.model(kind == "neox"))
    else:
        source = llamas.save(tmp_path / "theirs", llamas.model(kind))
        words = {"eos_token": "<|end|>"} | ({"bos_token": "<|begin|>"} if kind == "Llama" else {})
        llamas.describe(source, words, begins=kind == "Llama")
    (tmp_path / "theirs" / "generation_config.json").write_text('{"repetition_penalty": 1.5, "temperature": 0.5}')
    assert convert(["from-huggingface", str(tmp_path / "theirs"), str(tmp_path / "converted")]) == 0
    assert convert(["to-huggingface", str(tmp_path / "converted"), str(tmp_path / "folder")]) == 0
    for options in ({}, {"add_bos_token": False}, {"add_bos_token": True}):
        ours = FastWeightLM(str(tmp_path / "converted"), device="cpu", batch_size=2, **options)
        theirs = HFLM(str(tmp_path / "folder"), device="cpu", dtype="float32", logits_cache=False, **options)
        found = []
        for lm in (ours, theirs):
            scores = [score for score, _ in lm.loglikelihood(requests("loglikelihood", CONTINUED))]
            scores += lm.loglikelihood_rolling(requests("loglikelihood_rolling", [("the cat sat",), ("mat",)]))
            until = {"until": ["xx"], "max_gen_toks": 5}
            found.append((scores, lm.generate_until(requests("generate_until", [("the cat", until)]))))
        assert found[0][0] == pytest.approx(found[1][0], abs=1e-4), options
        assert found[0][1] == found[1][1]


def test_what_is_greedy_is_said_to_be(checkpoint) -> None:
    """In a continuation of several words, each must be the most probable one."""
    lm = FastWeightLM(str(checkpoint("delta")), device="cpu", batch_size="auto")

    def likeliest(words: list[int]) -> int:
        with torch.no_grad():
            return int(lm.model(torch.tensor([words])).logits[0, -1].argmax())

    start = lm.tok_encode("w1 w2 w3")
    first = likeliest(start)
    second = likeliest([*start, first])
    others = [word for word in range(44) if word not in (first, second)]
    endings = [[first, second], [first, others[0]], [first, others[-1]], [others[0], likeliest([*start, others[0]])]]
    scores = lm._loglikelihood_tokens([(None, start, ending) for ending in [*endings, [first]]])
    assert [greedy for _, greedy in scores] == [True, False, False, False, True]


def test_a_text_is_read_whole_if_the_state_has_a_fixed_size(checkpoint) -> None:
    words = torch.randint(4, 44, (100,), generator=torch.Generator().manual_seed(1)).tolist()
    for name in MODELS:
        lm = FastWeightLM(str(checkpoint(name)), device="cpu", batch_size="auto", segment=7)
        assert lm.max_length == (16 if name in LIMITED else UNLIMITED)
        seen = words[-17:] if name in LIMITED else words
        [(score, _)] = lm._loglikelihood_tokens([(None, words[:-2], words[-2:])])
        assert score == pytest.approx(read_alone(lm, seen, 2), abs=1e-4), name
    assert FastWeightLM(str(checkpoint("delta")), device="cpu", max_length=5).max_length == 5


def test_batches_are_of_like_length_and_no_larger_than_allowed(checkpoint, monkeypatch) -> None:
    lm = FastWeightLM(str(checkpoint("delta")), device="cpu", batch_size="auto", max_tokens=24, max_batch_size=4)
    shapes = []
    forward = lm.model.forward

    def spy(tokens: torch.Tensor, **options: Any) -> Any:
        shapes.append(tuple(tokens.shape))
        return forward(tokens, **options)

    monkeypatch.setattr(lm.model, "forward", spy)
    lengths = [2, 9, 30, 3, 8, 2, 12, 2, 2, 2, 2, 2]
    lm._loglikelihood_tokens([(None, [5 + n] * length, [6]) for n, length in enumerate(lengths)])
    assert shapes == [(1, 30), (2, 12), (3, 8), (4, 2), (2, 2)]
    info = lm.get_model_info()
    assert info["tokens"] == sum(lengths) and info["updates"] == 3
    assert info["tokens_per_second"] == pytest.approx(info["tokens"] / lm.seconds)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"segment": "x"}, "segment is 'x'; it must be"),
        ({"max_token": 5}, "max_token is 5; it cannot be set for a checkpoint"),
        ({"parallelize": True}, "parallelize is True; it cannot"),
        ({"checkpoint": "none.pt"}, "none.pt"),
        ({"dtype": "float31"}, "dtype is float31; it must be auto, float32"),
        ({"dtype": "int8"}, "dtype is int8; it must be"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], told: str, checkpoint) -> None:
    with pytest.raises(ValueError, match=told):
        FastWeightLM(**{"checkpoint": str(checkpoint("delta")), "device": "cpu", **options})


def test_a_continuation_has_a_token_and_no_more_than_the_model_takes(checkpoint) -> None:
    lm = FastWeightLM(str(checkpoint("hybrid")), device="cpu")
    for length in (0, 17):
        with pytest.raises(
            ValueError, match=f"a continuation has {length} tokens; it must have at least 1 and at most 16$"
        ):
            lm._loglikelihood_tokens([(None, [5], [6] * length)])
    with pytest.raises(ValueError, match=r"a continuation has 0 tokens; it must have at least 1$"):
        FastWeightLM(str(checkpoint("delta")), device="cpu")._loglikelihood_tokens([(None, [5], [])])
    after_nothing, after_end = lm._loglikelihood_tokens([(None, [], [6]), (None, [2], [6])])
    assert after_nothing == after_end


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["lm_eval", *words])
    return main()


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A folder with a task of its own, `words`, which reads a file."""
    (tmp_path / "words.jsonl").write_text('{"text": "w1 w2 w3"}\n{"text": "w4 w5"}\n')
    data = {"data_files": {"test": str(tmp_path / "words.jsonl")}, "cache_dir": str(tmp_path / "cache")}
    config = {"task": "words", "dataset_path": "json", "dataset_kwargs": data, "test_split": "test"}
    config |= {"output_type": "loglikelihood", "doc_to_text": "{{text}}", "doc_to_target": " w7"}
    config |= {"metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]}
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "words.yaml").write_text(json.dumps(config))
    return tmp_path


def test_a_checkpoint_is_read_to_be_checked_and_to_be_loaded_and_no_more(checkpoint, monkeypatch) -> None:
    path, load, loads = checkpoint("delta"), integrity.load, []
    for module in (integrity, import_module("fairseq.integrity")):  # fairseq has a copy
        monkeypatch.setattr(module, "load", lambda file, mapped: loads.append(mapped) or load(file, mapped))
    assert model.load(path, None, None)[2] == 3
    assert loads == [True, False]  # the first copies nothing


@pytest.mark.slow
def test_the_command_knows_checkpoints_and_exported_folders(
    few_tasks: None, task: Path, checkpoint, monkeypatch, caplog
) -> None:
    from fairseq_fastweights.conversion.trained_models import load_for_causal_lm
    from fairseq_fastweights.ops.backends import say_again

    model, tokenizer = load_for_causal_lm(checkpoint("delta"))
    model.save_pretrained(task / "exported")
    tokenizer.save_pretrained(task / "exported")
    results = []
    say_again()
    caplog.clear()
    for number, words in enumerate(
        (
            ["fairseq-fastweights", "--model_args", f"checkpoint={checkpoint('delta')}"],
            ["hf", "--model_args", f"pretrained={task / 'exported'}"],
        )
    ):
        shared = ["--tasks", "words", "--include_path", str(task / "tasks"), "--device", "cpu"]
        assert call(monkeypatch, "--model", *words, *shared, "--output_path", str(task / f"{number}.json")) == 0
        [file] = task.glob(f"{number}_*.json")
        results.append(json.loads(file.read_text()))
    ours, theirs = results
    assert ours["results"]["words"]["acc,none"] == theirs["results"]["words"]["acc,none"]
    assert ours["config"]["tokens_per_second"] > 0
    assert sum("fast weight rules run by" in message for message in caplog.messages) == 1


def test_what_is_wrong_is_said_in_a_line(few_tasks: None, task: Path, checkpoint, monkeypatch, capsys) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.delitem(sys.modules, "fairseq_fastweights.huggingface", raising=False)
    for name, content in (("bad.yaml", "[: "), ("unknown/config.json", '{"model_type": "unknown"}')):
        (task / name).parent.mkdir(exist_ok=True)
        (task / name).write_text(content)
    config = json.loads((task / "tasks" / "words.yaml").read_text())
    (task / "tasks" / "typed.yaml").write_text(json.dumps(config | {"task": "typed", "output_type": "none"}))
    ours = ["--model", "fairseq-fastweights", "--device", "cpu", "--model_args"]
    theirs, own = ["--model", "hf", "--device", "cpu", "--model_args"], ["--include_path", str(task / "tasks")]
    for words, told in (
        ([*ours, f"checkpoint={checkpoint('delta')}", "--tasks", "piqa"], "Couldn't reach 'baber/piqa' on the Hub"),
        ([*ours, f"checkpoint={checkpoint('delta')}", *own, "--tasks", "typed"], "invalid output_type 'none'"),
        ([*ours, "checkpoint=none.pt", "--tasks", "piqa"], "none.pt: there is no such checkpoint"),
        ([*theirs, f"pretrained={task / 'none'}", "--tasks", "piqa"], str(task / "none")),
        ([*theirs, f"pretrained={task / 'unknown'}", "--tasks", "piqa"], "does not recognize this architecture"),
        (["--model", "none", "--tasks", "piqa"], "model 'none'"),
        (["--config", str(task / "none.yaml"), "--tasks", "piqa"], "Config file not found"),
        (["--config", str(task / "bad.yaml"), "--tasks", "piqa"], "Invalid YAML in"),
        (["--model", "hf", "--tasks", "piqa", "--log_samples"], "Specify --output_path"),
        ([*ours, "checkpoint=none.pt", "--tasks", "none"], "Tasks not found: none"),
    ):
        assert call(monkeypatch, *words) == 2, words
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith("python -m fairseq_fastweights.lm_eval: error: ") and told in last, last
    monkeypatch.setenv("FASTWEIGHTS_TRACEBACK", "1")
    assert call(monkeypatch, *words) == 2
    assert "Traceback" in capsys.readouterr().err
    assert "fairseq_fastweights.huggingface" in sys.modules  # transformers knows its models


def test_a_bug_keeps_its_traceback(few_tasks: None, checkpoint, monkeypatch) -> None:
    monkeypatch.setattr(model, "load", lambda *arguments: int("a bug"))
    words = ["--model", "fairseq-fastweights", "--model_args", f"checkpoint={checkpoint('delta')}", "--tasks", "piqa"]
    with pytest.raises(ValueError, match="'a bug'"):
        call(monkeypatch, *words)
