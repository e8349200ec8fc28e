"""examples/finetuning with attention transferred first, and examples/gpt2 with a tokenizer of another kind."""

from __future__ import annotations

from pathlib import Path

from tests.conversion import llamas

from .conftest import EXAMPLES, options, run_script, write_training
from .test_finetuning import SUMMARIZE, WIKITEXT2, cells


def test_a_fifth_of_the_budget_is_the_transfer_and_the_table_counts_it(tmp_path: Path, commands, run) -> None:
    (tmp_path / "dict.txt").touch()
    out = tmp_path / "out"
    (out / "source").mkdir(parents=True)
    for name in ("trained", "test.log"):
        (out / "source" / name).touch()
    models = ["linear-32-aligned", "decay-16-aligned"]
    calls = list(map(options, commands(WIKITEXT2, tmp_path, out, *models, env={"JOBS": "1"})))
    assert len(calls) == 2 * 4
    for model, (transfer, start, training, test) in zip(models, (calls[:4], calls[4:]), strict=True):
        source, aligned = str(out / "source" / "checkpoint_best.pt"), out / model / "aligned"
        assert transfer["--criterion"] == "attention_transfer" and transfer["--transfer-from"] == source
        assert transfer["--save-dir"] == str(aligned) and transfer["--max-update"] == "160"
        for call in (start, training):
            assert call["--finetune-from-model"] == str(aligned / "checkpoint_last.pt")
            assert call["--criterion"] == "adaptive_loss" and call["--save-dir"] == str(out / model)
        # Validated when the others are: after 320, 480, 640 and 800.
        assert training["--max-update"] == "640" and training["--validate-interval-updates"] == "160"
        assert ("--scale-read-out" in transfer) is ("--scale-read-out" in training) is (model == models[1])
        assert test["--path"] == str(out / model / "checkpoint_best.pt")
    assert (calls[0]["--update-rule"], calls[0]["--feature-map"], calls[0]["--normalization"]) == (
        "sum",
        "relu",
        "attention",
    )

    write_training(tmp_path / "runs" / "linear-32-aligned", 40)
    (tmp_path / "runs" / "linear-32-aligned" / "test.log").write_text("x | Perplexity: 4.0\n")
    (tmp_path / "runs" / "linear-32-aligned" / "start.log").write_text('x | valid | {"valid_ppl": "90.0"}\n')
    (tmp_path / "runs" / "linear-32-aligned" / "aligned.log").write_text('x | {"train_num_updates": "20"}\n')
    _, table, _ = run(SUMMARIZE, tmp_path / "runs")
    head, _, row = (cells_of_row.split(" | ")[3:] for cells_of_row in cells(table))
    assert head == ["before", "20", "40", "60", "test"] and row == ["–", "90.0", "50.0", "25.0", "4.0"]


def test_text_is_cut_by_any_tokenizer_that_a_converted_model_has(tmp_path: Path) -> None:
    source, text = tmp_path / "source", tmp_path / "text"
    source.mkdir()
    text.mkdir()
    tokenizer = llamas.tokenizer()
    tokenizer.save(str(source / "tokenizer.json"))
    (source / "tokenizer_words.json").write_text('{"end_of_text": 1}')
    for split in ("train", "valid"):
        (text / f"{split}.txt").write_text(f"{llamas.TEXT}\n<|endoftext|>\nthe mat")
    result = run_script(EXAMPLES / "gpt2" / "encode.py", source, text, tmp_path)
    assert result.returncode == 0, result.stderr
    numbers = [" ".join(map(str, tokenizer.encode(document).ids)) for document in (llamas.TEXT, "the mat")]
    assert (tmp_path / "valid.bpe").read_text().splitlines() == numbers
