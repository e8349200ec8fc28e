"""Choi's six benchmarks, of lm_eval, on lines of their shape: the scores are those that one counts by hand."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq_fastweights.lm_eval.__main__ import main
from tests.conftest import ROOT, import_plugin

sys.path.append(str(ROOT / "examples" / "xatl"))  # as when its programs are started
benchmark_data = import_module("benchmark_data")

ARC = ("Question: What sat?\nAnswer:", ["mat", "cats there", "the theme"])
# By task: a line of its file, and what of it the model reads: contexts, continuations and which is right.
LINES: dict[str, list[tuple[dict[str, Any], list[str], list[str], int]]] = {
    "hellaswag": [
        (
            {"activity_label": "Cats", "ctx_a": "The cat [on a mat]  sat.", "ctx_b": "it", "label": str(label)}
            | {"endings": ["is there.", "sat on the mat and the theme.", "[title] sat", " the cats"]},
            ["Cats: The cat sat. It"] * 4,
            ["is there.", "sat on the mat and the theme.", ". sat", "the cats"],
            label,
        )
        for label in range(4)
    ],
    "piqa": [
        (
            {"goal": f"{goal}", "sol1": "on the mat", "sol2": "the other cats", "label": label},
            [f"Question: {goal}\nAnswer:"] * 2,
            ["on the mat", "the other cats"],
            label,
        )
        for goal, label in (("sit", 0), ("sit there", 1), ("the theme", 0))
    ],
    "arc_easy": [
        (
            {"question": "What sat?", "choices": {"text": ARC[1], "label": ["A", "B", "C"]}, "answerKey": "ABC"[right]},
            [ARC[0]] * 3,
            ARC[1],
            right,
        )
        for right in range(3)
    ],
    "arc_challenge": [
        (
            {"question": "What sat?", "choices": {"text": ["and", ":"], "label": ["1", "2"]}, "answerKey": right},
            [ARC[0]] * 2,
            ["and", ":"],
            int(right) - 1,
        )
        for right in "122"
    ],
    "winogrande": [
        (
            {"sentence": f"The cat on {the} mat sat as _ was there.", "option1": "it", "option2": "that", "answer": a},
            [f"The cat on {the} mat sat as it", f"The cat on {the} mat sat as that"],
            ["was there."] * 2,
            int(a) - 1,
        )
        for the, a in (("the", "1"), ("the", "2"), ("that", "2"))
    ],
}
PASSAGES = ["the cat sat on the mat", "that is the  theme", "and the other cats sat there:"]


def write_lines(folder: Path, **others: list[Any]) -> None:
    """A file for each benchmark."""
    folder.mkdir(exist_ok=True)
    lines = {task: [line for line, *_ in rows] for task, rows in LINES.items()}
    lines["lambada_openai"] = [{"text": text} for text in PASSAGES]
    for task, objects in (lines | others).items():
        (folder / f"{task}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in objects))


class ByHand:
    """Scores of transformers' own model, one continuation at a time."""

    def __init__(self, folder: Path) -> None:
        import transformers

        self.model = transformers.GPTNeoXForCausalLM.from_pretrained(folder).eval()
        self.tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))

    def score(self, context: str, text: str) -> tuple[float, bool]:
        """The log-probability of what `text` has more than `context`, and whether each subword is the likeliest."""
        start, whole = len(self.tokenizer(context).input_ids), self.tokenizer(text).input_ids
        with torch.no_grad():
            logits = self.model(torch.tensor([whole[:-1]])).logits[0].log_softmax(-1)
        steps = range(start - 1, len(whole) - 1)
        return sum(logits[t, whole[t + 1]].item() for t in steps), all(
            logits[t].argmax() == whole[t + 1] for t in steps
        )

    def passage(self) -> str:
        """One that ends as the model would have it."""
        draw, words, word = random.Random(0), "the cat sat on mat and other cats there that is theme".split(), ""
        while not re.fullmatch(r" \w+", word):
            text = " ".join(draw.choices(words, k=6))
            with torch.no_grad():
                logits = self.model(torch.tensor([self.tokenizer(text).input_ids])).logits
            word = self.tokenizer.decode([logits[0, -1].argmax().item()])
        return text + word

    def accuracies(self, task: str) -> tuple[float, float]:
        """The accuracy, and that with scores divided by the choices' lengths, in percent."""
        right = [0, 0]
        for _, contexts, continuations, answer in LINES[task]:
            scores = [self.score(c, f"{c} {text}")[0] for c, text in zip(contexts, continuations, strict=True)]
            divided = [score / len(text) for score, text in zip(scores, continuations, strict=True)]
            for kind, values in enumerate((scores, divided)):
                right[kind] += max(range(len(values)), key=values.__getitem__) == answer
        return right[0] / len(LINES[task]), right[1] / len(LINES[task])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_scores_are_those_counted_by_hand(few_tasks: None, tmp_path: Path, monkeypatch) -> None:
    import_plugin()
    from fairseq_fastweights.conversion.from_huggingface import from_huggingface
    from tests.conversion import sources

    folder = sources.save(tmp_path / "huggingface", sources.model(neox=True, max_position_embeddings=128))
    from_huggingface(folder, tmp_path / "run")
    shutil.move(tmp_path / "run" / "model.pt", tmp_path / "run" / "checkpoint_best.pt")
    by_hand = ByHand(folder)
    passages = [*PASSAGES, by_hand.passage()]
    write_lines(tmp_path / "data", lambada_openai=[{"text": text} for text in passages])
    assert benchmark_data.main([str(tmp_path / "tasks"), str(tmp_path / "data")]) == 0
    model = f"checkpoint={tmp_path}/run/checkpoint_best.pt,add_bos_token=False"
    words = ["--model", "fairseq-fastweights", "--model_args", model, "--batch_size", "auto", "--device", "cpu"]
    words += ["--include_path", str(tmp_path / "tasks"), "--output_path", str(tmp_path / "result.json")]
    monkeypatch.setattr(sys, "argv", ["lm_eval", *words, "--tasks", *benchmark_data.BENCHMARKS])
    assert main() == 0
    [file] = tmp_path.glob("result_*.json")
    results = json.loads(file.read_text())["results"]

    # LAMBADA as this project computed it before: the passage up to its last space is the context.
    scores = [by_hand.score(text[: text.rindex(" ")].rstrip(), text) for text in passages]
    assert sum(greedy for _, greedy in scores) == 1
    assert results["lambada_openai"]["acc,none"] == 1 / len(passages)
    expected = math.exp(-sum(score for score, _ in scores) / len(passages))
    assert results["lambada_openai"]["perplexity,none"] == pytest.approx(expected, rel=1e-4)
    counted = {task: by_hand.accuracies(task) for task in LINES}
    assert any(0 < plain < 1 for plain, _ in counted.values()) and any(
        plain != other for plain, other in counted.values()
    )
    for task, (plain, divided) in counted.items():
        assert results[task]["acc,none"] == pytest.approx(plain), task
        assert results[task].get("acc_norm,none", divided) == pytest.approx(divided), task


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
    ("hellaswag", [LINES["hellaswag"][0][0] | {"label": "4"}], "label, the number of the right one"),
    ("hellaswag", [LINES["hellaswag"][0][0] | {"endings": [1] * 4}], "line 1 must be"),
    ("piqa", [LINES["piqa"][0][0] | {"label": -1}], "label, 0 or 1"),
    ("arc_easy", [LINES["arc_easy"][0][0] | {"answerKey": "D"}], "answerKey, one of the labels"),
    ("arc_easy", [LINES["arc_easy"][0][0] | {"choices": {"text": ["mat"], "label": ["A", "B"]}}], "line 1 must be"),
    ("arc_challenge", [{"question": {"stem": "?"}, "choices": {"text": [], "label": []}}], "line 1 must be"),
    ("winogrande", [LINES["winogrande"][0][0] | {"sentence": "no gap"}], "in which _ stands for"),
    ("winogrande", [LINES["winogrande"][0][0] | {"answer": "12"}], '"1" or "2"'),
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
