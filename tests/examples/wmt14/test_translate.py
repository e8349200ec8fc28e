"""examples/wmt14: models of one budget, their translations in order, signed BLEU that is kept, and the table."""

import json
from pathlib import Path

import corpus
import pytest
import score

from tests.examples.conftest import options
from tests.examples.wmt14.conftest import PREPARE, SUMMARY

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with what generate.sh takes for a trained model."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "checkpoint_best.pt").touch()
    return tmp_path / "model"


@pytest.mark.slow
def test_translations_come_in_order_and_their_result_is_kept(stub_data: Path, model: Path, programs) -> None:
    """With a line for an empty source. It is not passed off as one of other options, nor half of it as a result."""
    cut, log = corpus.read_text(stub_data / "test.de"), []
    for number in (2, 0, 3, 1):
        text = cut[number] if number != 1 else ""
        log += [f"S-{number}\tx\n", f"H-{number}\t-0.5\t{text}\n", f"H-{number}\t-0.9\tworse\n"]
    lacking = [*(line for line in log if "-3" not in line[:4]), SUMMARY]
    for lines, message in ((lacking, "lacks 1 of 4 sentences"), (log, "ends before fairseq-generate")):
        result, _ = programs.generate(stub_data, model, lines)
        assert result.returncode == 1 and message in result.stderr
        assert not list(model.glob("*.json")) and not list(model.glob("*.hyp"))
    result, (call,) = programs.generate(stub_data, model, [*log, SUMMARY], "--cpu", "--beam", "8")
    assert result.returncode == 0, result.stderr
    raw = corpus.read_text(stub_data / "raw" / "test.de")
    assert corpus.read_text(model / "generate-test.hyp") == [raw[0], "", corpus.clean(raw[2]), raw[3]]
    values = json.loads((model / "generate-test.json").read_text())
    assert values["signature"] in result.stdout and "|tok:13a|" in values["signature"]
    assert 90 < values["bleu"] < 100 and 90 < values["compound_split_bleu"] < 100  # a line is lacking
    expected = {"sentences": 4, "skipped": 0, "tokens": 1234, "seconds": 2.5, "tokens_per_second": 493.6}
    assert {key: values[key] for key in expected} == expected
    asked = options(call)
    assert (asked["--beam"], asked["--lenpen"], asked["--path"]) == ("8", "0.6", str(model / "checkpoint_best.pt"))

    again, calls = programs.generate(stub_data, model, ["other"], "--cpu", "--beam", "8")
    assert again.returncode == 0 and not calls and "test: BLEU" in again.stdout
    other, calls = programs.generate(stub_data, model, ["other"], "--beam", "1")
    assert other.returncode == 1 and not calls and "--cpu --beam 8, and these are --beam 4" in other.stderr
    (model / "checkpoint_best.pt").write_text("other weights")
    result, calls = programs.generate(stub_data, model, [*log, SUMMARY], "--cpu", "--beam", "8")
    assert "generate-test.json is of other model\n" in result.stdout and len(calls) == 1


def test_compound_split_bleu_is_of_moses_tokens() -> None:
    dash = " ##AT##-##AT## "
    assert score.split_compounds("a state-of-the – - a -b c- 1-2") == f"a state{dash}of{dash}the – - a -b c- 1{dash}2"
    assert score.split_compounds("x-y-z") == f"x{dash}y-z"  # as in Perl: y is in the first match
    split = score.tokenize_and_split(["Die wohl-bekannte Stadt (oft), z.B. heute."], "de")
    assert split == [f"Die wohl{dash}bekannte Stadt ( oft ) , z.B. heute ."]
    values = score.score(["das wohl-bekannte Haus ist alt ."], ["das sehr-bekannte Haus ist alt ."], "de")
    # 13a keeps the compound: 5 of 6 words, 3 of 5 pairs ...; split, there are 7 of 8 words, 5 of 7 pairs ...
    assert values["bleu"] == pytest.approx(100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25)
    assert values["compound_split_bleu"] == pytest.approx(100 * (7 / 8 * 5 / 7 * 4 / 6 * 3 / 5) ** 0.25)


@pytest.mark.slow
def test_moses_tokens_and_bpe_become_text_again(parallel: Path, model: Path, tmp_path: Path, programs) -> None:
    data, texts = tmp_path / "data", corpus.read_text(parallel / "test.de")
    env = {"VOCABULARY": 60, "SUBWORDS": "bpe", "WORKERS": 1}
    result, [call] = programs.run(PREPARE, data, parallel, env=env)
    assert result.returncode == 0 and "--srcdict" not in call, result.stderr
    assert (data / "test.de").read_text().count("@-@") == 2
    # A generation that repeats the references, of which fairseq does not know two characters.
    lines = [line.replace("日 本", "<unk> <unk>") for line in corpus.read_text(data / "test.de")]
    result, _ = programs.generate(data, model, [*(f"H-{n}\t0\t{line}\n" for n, line in enumerate(lines)), SUMMARY])
    assert result.returncode == 0, result.stderr
    assert corpus.read_text(model / "generate-test.hyp") == [x.replace("日本", "<unk> <unk>") for x in texts]
