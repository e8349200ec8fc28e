"""Choi's six benchmarks, of lm_eval, on lines of their shape: the scores are those of lm_eval's own model."""

from __future__ import annotations

import json
import random
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fairseq_fastweights.lm_eval.__main__ import main
from tests.conftest import ROOT, import_plugin

sys.path.append(str(ROOT / "examples" / "xatl"))  # as when its programs are started
benchmark_data = import_module("benchmark_data")

CHOICES = {"text": ["mat", "cats there", "the theme"], "label": ["A", "B", "C"]}
LINES: dict[str, list[dict[str, Any]]] = {
    "hellaswag": [
        {"activity_label": "Cats", "ctx_a": "The cat [on a mat]  sat.", "ctx_b": "it", "label": str(label)}
        | {"endings": ["is there.", "sat on the mat and the theme.", "[title] sat", " the cats"]}
        for label in range(4)
    ],
    "piqa": [
        {"goal": goal, "sol1": "on the mat", "sol2": "the other cats", "label": label}
        for goal, label in (("sit", 0), ("sit there", 1), ("the theme", 0))
    ],
    "arc_easy": [{"question": "What sat?", "choices": CHOICES, "answerKey": right} for right in "ABC"],
    "arc_challenge": [
        {"question": "What sat?", "choices": {"text": ["and", ":"], "label": ["1", "2"]}, "answerKey": right}
        for right in "122"
    ],
    "winogrande": [
        {"sentence": f"The cat on {the} mat sat as _ was there.", "option1": "it", "option2": "that", "answer": right}
        for the, right in (("the", "1"), ("the", "2"), ("that", "2"))
    ],
}
PASSAGES = ["the cat sat on the mat", "that is the  theme", "and the other cats sat there:"]


def write_lines(folder: Path, **others: list[Any]) -> None:
    """A file for each benchmark."""
    folder.mkdir(exist_ok=True)
    lines = {**LINES, "lambada_openai": [{"text": text} for text in PASSAGES], **others}
    for task, objects in lines.items():
        (folder / f"{task}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in objects))


def likely_passage(folder: Path) -> str:
    """One that ends as the model would have it."""
    model = transformers.GPTNeoXForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    draw, words, word = random.Random(0), "the cat sat on mat and other cats there that is theme".split(), ""
    while not re.fullmatch(r" \w+", word):
        text = " ".join(draw.choices(words, k=6))
        with torch.no_grad():
            logits = model(torch.tensor([tokenizer(text).input_ids])).logits
        word = tokenizer.decode([logits[0, -1].argmax().item()])
    return text + word


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_checkpoint_scores_as_lm_evals_own_model_on_all(few_tasks: None, tmp_path: Path, monkeypatch) -> None:
    import_plugin()
    from fairseq_fastweights.conversion.from_huggingface import from_huggingface
    from tests.conversion import sources

    folder = sources.save(tmp_path / "huggingface", sources.model(neox=True, max_position_embeddings=128))
    from_huggingface(folder, tmp_path / "run")
    passages = [*PASSAGES, likely_passage(folder)]
    write_lines(tmp_path / "data", lambada_openai=[{"text": text} for text in passages])
    assert benchmark_data.main([str(tmp_path / "tasks"), str(tmp_path / "data")]) == 0
    found = []
    for number, (kind, place) in enumerate((("fairseq-fastweights", "checkpoint"), ("hf", "pretrained"))):
        path = tmp_path / "run" / "model.pt" if number == 0 else folder
        words = ["--model", kind, "--model_args", f"{place}={path},add_bos_token=False", "--device", "cpu"]
        words += ["--include_path", str(tmp_path / "tasks"), "--output_path", str(tmp_path / f"{number}.json")]
        monkeypatch.setattr(sys, "argv", ["lm_eval", *words, "--tasks", *benchmark_data.BENCHMARKS])
        assert main() == 0
        [file] = tmp_path.glob(f"{number}_*.json")
        found.append(json.loads(file.read_text())["results"])
    ours, theirs = found
    assert ours["lambada_openai"]["acc,none"] == 1 / len(passages)  # the last one alone
    for task in benchmark_data.BENCHMARKS:
        scores = {name: x for name, x in theirs[task].items() if isinstance(x, float)}
        assert scores and {name: ours[task][name] for name in scores} == pytest.approx(scores, rel=1e-4), task
    assert any(0 < theirs[task]["acc,none"] < 1 for task in LINES)


def test_the_tasks_are_lm_evals_but_for_their_data(few_tasks: None, tmp_path: Path) -> None:
    from lm_eval.tasks import TaskManager

    write_lines(tmp_path / "data")
    benchmark_data.write_tasks(tmp_path / "tasks", tmp_path / "data")
    theirs, ours = TaskManager().task_index, TaskManager(include_path=tmp_path / "tasks").task_index
    for name, benchmark in benchmark_data.BENCHMARKS.items():
        config = theirs[name].cfg
        assert (config["dataset_path"], config.get("dataset_name")) == benchmark.hub
        assert (config.get("test_split") or config["validation_split"]) == benchmark.split
        changed = {key for key, value in ours[name].cfg.items() if config.get(key) != value}
        assert changed <= {"dataset_path", "dataset_name", "dataset_kwargs", "training_split", "validation_split"}


BAD = [
    ("lambada_openai", [{"text": "two words"}, {"text": "one"}], "line 2 must be a JSON object with text, a passage"),
    ("lambada_openai", [["two words"]], "line 1 must be"),
    ("hellaswag", [LINES["hellaswag"][0] | {"label": "4"}], "label, the number of the right one"),
    ("hellaswag", [LINES["hellaswag"][0] | {"endings": [1] * 4}], "line 1 must be"),
    ("piqa", [LINES["piqa"][0] | {"label": -1}], "label, 0 or 1"),
    ("arc_easy", [LINES["arc_easy"][0] | {"answerKey": "D"}], "answerKey, one of the labels"),
    ("arc_easy", [LINES["arc_easy"][0] | {"choices": {"text": ["mat"], "label": ["A", "B"]}}], "line 1 must be"),
    ("arc_challenge", [{"question": {"stem": "?"}, "choices": {"text": [], "label": []}}], "line 1 must be"),
    ("winogrande", [LINES["winogrande"][0] | {"sentence": "no gap"}], "in which _ stands for"),
    ("winogrande", [LINES["winogrande"][0] | {"answer": "12"}], '"1" or "2"'),
    ("piqa", [], "piqa.jsonl is empty"),
]


@pytest.mark.parametrize(("task", "lines", "told"), BAD, ids=lambda value: str(value)[:20])
def test_lines_of_another_shape_are_refused(task: str, lines: list[Any], told: str, tmp_path: Path, capsys) -> None:
    write_lines(tmp_path, **{task: lines})
    assert benchmark_data.main([str(tmp_path / "tasks"), str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert f"error: {tmp_path / task}.jsonl" in error and told in error
    assert not (tmp_path / "tasks").exists()


def test_data_that_are_not_there_are_asked_for_by_name(tmp_path: Path, monkeypatch, capsys) -> None:
    write_lines(tmp_path)
    for name in ("piqa", "winogrande"):
        (tmp_path / f"{name}.jsonl").unlink()
    assert benchmark_data.main([str(tmp_path / "tasks"), str(tmp_path)]) == 1
    assert "which holds no piqa.jsonl, winogrande.jsonl" in capsys.readouterr().err

    def load(name: str, part: str | None) -> None:
        if name != "baber/piqa":
            raise ConnectionError(name)

    monkeypatch.setattr("datasets.load_dataset", load)
    assert benchmark_data.main([str(tmp_path / "tasks")]) == 1
    error = capsys.readouterr().err
    assert "EleutherAI/lambada_openai (or lambada_openai.jsonl), Rowan/hellaswag" in error and "baber/piqa" not in error
