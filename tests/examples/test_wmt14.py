"""examples/wmt14: text that is prepared, kept, refused or downloaded; translations in order, and BLEU that is kept."""

import gzip
import json
import random
import shutil
import tarfile
from pathlib import Path
from typing import Any

import corpus
import generate as translation
import pytest
import subwords
from common.files import UserError, read_text
from papers import ledger

from .conftest import EXAMPLES, INTERRUPTION, TINY, Programs, options, run_script

PREPARE, GENERATE = (EXAMPLES / "wmt14" / name for name in ("prepare.sh", "generate.sh"))
LEXICON = """the=die well-known=wohl-bekannte café=Kaffeehaus state-of-the-art=hoch-moderne costs=kostet 12.50=12,50
    €=€ naïve=naive “ideas”=„Ideen“ and=und green=grüne dogs=Hunde don't=nicht sleep=schlafen (often)=(oft) &=&
    furiously=wütend Straße=Straße –=– a/b=a/b""".split()
TEST = [
    *(("the green dogs sleep.", "die grüne Hunde schlafen."), ("", "nichts")),
    ("the 日本 café\u2028costs 12.50 €!", "die 日本 Kaffeehaus kostet 12,50 €!"),
    ("a well-known\tstate-of-the-art café.", "die wohl-bekannte hoch-moderne Kaffeehaus."),
]
SUMMARY = "2026-01-01 | INFO | x | Translated 4 sentences (1,234 tokens) in 2.5s (1.60 sentences/s, 493.60 tokens/s)\n"
STUBS = {
    "fairseq-generate": 'cat "${GENERATED:-/dev/null}"',
    # Leaves the text that it is given.
    "fairseq-preprocess": f'mkdir -p "$dest" && cp "$encoded"/{{train,valid,test}}.?? "$dest"\n{INTERRUPTION}',
    "sacrebleu": 'cat "$SETS/$2.$6" 2> /dev/null || { echo "no such set"; exit 1; }',
    # The digest that prepare.sh expects of the archive, unless that is damaged.
    "sha256sum": 'name=$(basename "$(readlink /proc/$$/fd/0)" .part); cat > "${DAMAGED:-/dev/null}"\n'
    f'[ -n "${{DAMAGED:-}}" ] || grep -A 1 "/$name " "{PREPARE}" | tail -n 1 | tr -d " "',
}


def write_pairs(folder: Path, split: str, pairs: list[tuple[str, str]]) -> None:
    for language, lines in zip(("en", "de"), zip(*pairs, strict=True), strict=True):
        corpus.write_text(folder / f"{split}.{language}", lines)


@pytest.fixture(scope="module")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A FOLDER for prepare.sh; the second line of its test set is empty, and one has a line end of Unicode's in it."""
    folder, draw, pairs = tmp_path_factory.mktemp("parallel"), random.Random(1), []
    for _ in range(306):  # sentences and their translations, word by word
        words = draw.choices(LEXICON, k=draw.randint(2, 8))
        pairs.append(tuple(f"{' '.join(side)}." for side in zip(*(word.split("=") for word in words), strict=True)))
    for split, some in (("train", pairs[:300]), ("valid", pairs[300:]), ("test", TEST)):
        write_pairs(folder, split, some)
    return folder


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    return Programs(tmp_path_factory.mktemp("wmt14") / "programs", STUBS)


def prepare(programs: Programs, *arguments: object, **how: Any) -> str:
    """Runs prepare.sh with a vocabulary for small texts, unless `how` has another."""
    return programs.run(PREPARE, *arguments, **{"VOCABULARY": 360, "WORKERS": 1, **how})[0]


@pytest.fixture(scope="module")
def stub_data(parallel: Path, programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`parallel` as prepare.sh leaves it, but not binarised."""
    out = tmp_path_factory.mktemp("stub_data") / "data"
    prepare(programs, out, parallel)
    return out


def test_text_is_known_by_its_content_compressed_or_not(parallel: Path, tmp_path: Path) -> None:
    assert corpus.clean(" \ufeffa\tb  c\u2028d\u00a0e\u3000f\x85g\x00h\x1fi ") == "a b c d e f g h i"
    whole, copy = corpus.survey(parallel, "en", "de"), shutil.copytree(parallel, tmp_path / "copy")
    (copy / "train.en.gz").write_bytes(gzip.compress((copy / "train.en").read_bytes()))
    with pytest.raises(UserError, match=r"holds both train\.en and train\.en\.gz; one of them must go"):
        corpus.survey(copy, "en", "de")
    (copy / "train.en").unlink()
    again = corpus.survey(copy, "en", "de")
    assert again.digest == whole.digest and again.pairs == {"train": 300, "valid": 6, "test": 4}
    assert corpus.survey(parallel, "de", "en").digest != whole.digest
    for name, content, message in (("train.de", b"a\nb\n", "has 300 lines and .* has 2"), ("test.en", b"", "is empty")):
        (copy / name).write_bytes(content)
        with pytest.raises(UserError, match=message):
            corpus.survey(copy, "en", "de")


def test_pairs_fall_out_for_reasons_that_are_counted(tmp_path: Path, programs: Programs) -> None:
    pairs = [("", "a b"), (" \u00a0", "a"), ("a", ""), ("a b c", "a b c a b"), ("a b c", "a")]
    pairs += [("a b c", "a b d")] * 20 + [("a b c a b c", "a b c a b c")] * 3
    for split in ("train", "valid", "test"):  # of the last two none falls out
        write_pairs(tmp_path, split, pairs)
    env = {"VOCABULARY": 268, "MAX_LENGTH": 5}  # each letter a subword, with the space before it
    said = prepare(programs, tmp_path / "out", tmp_path, **env)
    reasons = "3 with an empty line, 3 of more than 5 subwords, 2 with a ratio above 1.5; valid: 28, test: 28\n"
    assert f"train: 20 of 28 pairs kept; fell out: {reasons}" in said
    assert len(read_text(tmp_path / "out" / "train.en")) == 20
    said = prepare(programs, tmp_path / "none", tmp_path, fails=True, **env | {"MAX_LENGTH": 1})
    assert "no pair of the training text is left: train: 0 of 28 pairs" in said


def test_fairseq_gets_all_subwords_and_an_interrupted_preparation_goes_on(parallel, tmp_path, programs) -> None:
    out, env = tmp_path / "out", {"VOCABULARY": 361, "WORKERS": 1}
    assert "VOCABULARY is 99999; this text gives" in prepare(programs, out, parallel, fails=True, VOCABULARY=99_999)
    said, [call] = programs.run(PREPARE, out, parallel, fails=True, INTERRUPT="KILL", **env)
    assert not out.exists() and "binarising" in said and "cleaning" not in said
    asked = options(call)
    assert "--joined-dictionary" in asked and (asked["--source-lang"], asked["--target-lang"]) == ("en", "de")
    rows = [line.rsplit(" ", 1) for line in read_text(Path(asked["--srcdict"]))]
    real = [word for word, _ in rows if not word.startswith("madeupword")]
    assert len(real) == 361 - 3 and (len(rows) + 4) % 8 == 0 and len(rows) - len(real) < 8  # a round number of them
    text = [line for x in ("en", "de") for line in read_text(Path(f"{asked['--trainpref']}.{x}"))]
    assert sum(int(count) for _, count in rows) == sum(len(line.split()) for line in text)
    said = prepare(programs, out, parallel, **env)
    assert "learning" not in said and "binarising" in said
    assert (out / "preparation.json").exists() and not (tmp_path / "out.unfinished").exists()


def test_a_finished_folder_has_all_pairs_and_is_left_alone(stub_data, parallel, tmp_path, programs) -> None:
    model = subwords.SentencePieces((stub_data / "subwords.model").read_bytes())
    for name in (f"{split}.{language}" for split in corpus.SPLITS for language in ("en", "de")):
        raw, cut = read_text(parallel / name), list(map(model.decode, read_text(stub_data / name)))
        if name.startswith("train"):
            assert cut and set(cut) <= set(raw)
        else:
            assert cut == list(map(corpus.clean, raw)) and read_text(stub_data / "raw" / name) == raw
    before = {path: path.stat().st_mtime_ns for path in stub_data.rglob("*")}
    write_pairs(shutil.copytree(parallel, tmp_path / "copy"), "valid", [("a", "b")])
    for folder, env, message in (
        (parallel, {}, f"{stub_data} is finished\n"),
        (parallel, {"VOCABULARY": 370, "SUBWORDS": "bpe"}, "subwords sentencepiece, not bpe, vocabulary 360, not 370"),
        (tmp_path / "copy", {}, "was made with other text; name another folder"),
    ):
        assert message in prepare(programs, f"{stub_data}/", folder, fails="finished" not in message, **env)
    assert before == {path: path.stat().st_mtime_ns for path in stub_data.rglob("*")}


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs Linux")
def test_wmt14_is_downloaded_and_a_download_that_was_cut_off_goes_on(parallel, stub_data, tmp_path, programs) -> None:
    for start, path, member in (
        (0, "wmt13/training-parallel-europarl-v7.tgz", "training/europarl-v7.de-en"),
        (100, "wmt13/training-parallel-commoncrawl.tgz", "commoncrawl.de-en"),
        (200, "wmt14/training-parallel-nc-v9.tgz", "training/news-commentary-v9.de-en"),
    ):
        archive = tmp_path / "served" / path
        archive.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive, "w:gz") as tar:
            for language in ("en", "de"):
                lines = read_text(parallel / f"train.{language}")[start : start + 100]
                corpus.write_text(tmp_path / "member", lines)
                tar.add(tmp_path / "member", f"{member}.{language}")
    (tmp_path / "sets" / "wmt14").mkdir(parents=True)
    for name, split in (("wmt13", "valid"), ("wmt14/full", "test")):
        for side, language in (("src", "en"), ("ref", "de")):
            shutil.copy(parallel / f"{split}.{language}", tmp_path / "sets" / f"{name}.{side}")
    out, whole = tmp_path / "out", tmp_path / "served" / "wmt13" / "training-parallel-europarl-v7.tgz"
    part = tmp_path / "out.unfinished" / "downloads" / f"{whole.name}.part"
    url = (tmp_path / "served").as_uri()
    prepare(programs, out, fails=True, WMT14_URL=url, DAMAGED=tmp_path / "damaged")
    assert not out.exists() and not list(part.parent.glob("*"))
    content = whole.read_bytes()
    part.write_bytes(content[:1000])
    whole.write_bytes(b"\0" * 1000 + content[1000:])  # these bytes must not be fetched again
    said = prepare(programs, out, fails=True, WMT14_URL=url, SETS=tmp_path / "nowhere")
    assert "sacrebleu cannot fetch wmt13" in said and not out.exists()
    shutil.rmtree(tmp_path / "served")  # all of it has come
    assert "downloading" not in prepare(programs, out, WMT14_URL=url, SETS=tmp_path / "sets")
    for path in stub_data.rglob("*.*"):  # the same text as from a folder
        if path.name != "preparation.json":
            assert (out / path.relative_to(stub_data)).read_bytes() == path.read_bytes()


def generate(programs: Programs, data: Path, model: Path, lines: list[str], *arguments: str, fails: bool = False):
    """Runs generate.sh for the test set, if fairseq-generate logs these lines."""
    (log := data.parent / "said").write_text("".join(lines), encoding="utf-8")
    return programs.run(GENERATE, data, model, *arguments, fails=fails, SUBSETS="test", GENERATED=log)


@pytest.mark.slow
def test_translations_come_in_order_and_their_result_is_kept(stub_data: Path, tmp_path: Path, programs) -> None:
    """With a line for an empty source. It is not passed off as one of other options, nor half of it as a result."""
    (checkpoint := tmp_path / "checkpoint_best.pt").touch()
    cut, log = read_text(stub_data / "test.de"), []
    for number in (2, 0, 3, 1):
        text = cut[number] if number != 1 else ""
        log += [f"S-{number}\tx\n", f"H-{number}\t-0.5\t{text}\n", f"H-{number}\t-0.9\tworse\n"]
    lacking = [*(line for line in log if "-3" not in line[:4]), SUMMARY]
    for lines, message in ((lacking, "lacks 1 of 4 sentences"), (log, "ends before fairseq-generate")):
        assert message in generate(programs, stub_data, tmp_path, lines, fails=True)[0]
        assert not list(tmp_path.glob("*.json")) and not list(tmp_path.glob("*.hyp"))
    said, (call,) = generate(programs, stub_data, tmp_path, [*log, SUMMARY], "--cpu", "--beam", "8")
    raw = read_text(stub_data / "raw" / "test.de")
    assert read_text(tmp_path / "generate-test.hyp") == [raw[0], "", corpus.clean(raw[2]), raw[3]]
    values = json.loads((tmp_path / "generate-test.json").read_text())
    assert values["signature"] in said and "|tok:13a|" in values["signature"]
    assert 90 < values["bleu"] < 100 and 90 < values["compound_split_bleu"] < 100  # a line is lacking
    assert [values[name] for name in ("sentences", "skipped", "tokens", "seconds")] == [4, 0, 1234, 2.5]
    asked = options(call)
    assert (asked["--beam"], asked["--lenpen"], asked["--path"]) == ("8", "0.6", str(checkpoint))

    said, calls = generate(programs, stub_data, tmp_path, [], "--cpu", "--beam", "8")
    assert not calls and "test: BLEU" in said
    said, calls = generate(programs, stub_data, tmp_path, [], "--beam", "1", fails=True)
    assert not calls and "--cpu --beam 8, and these are --beam 4" in said
    checkpoint.write_text("other weights")
    said, calls = generate(programs, stub_data, tmp_path, [*log, SUMMARY], "--cpu", "--beam", "8")
    assert "generate-test.json is of other model\n" in said and len(calls) == 1


def test_compound_split_bleu_is_of_moses_tokens() -> None:
    dash = " ##AT##-##AT## "
    split = translation.tokenize_and_split(["Die wohl-bekannte Stadt (oft), z.B. x-y-z - -1 1-2."], "de")
    # As in Perl: y is in the first match.
    assert split == [f"Die wohl{dash}bekannte Stadt ( oft ) , z.B. x{dash}y-z - -1 1{dash}2 ."]
    values = translation.score(["das wohl-bekannte Haus ist alt ."], ["das sehr-bekannte Haus ist alt ."], "de")
    # 13a keeps the compound: 5 of 6 words, 3 of 5 pairs ...; split, there are 7 of 8 words, 5 of 7 pairs ...
    assert values["bleu"] == pytest.approx(100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25)
    assert values["compound_split_bleu"] == pytest.approx(100 * (7 / 8 * 5 / 7 * 4 / 6 * 3 / 5) ** 0.25)


@pytest.mark.slow
def test_moses_tokens_and_bpe_become_text_again(parallel: Path, tmp_path: Path, programs) -> None:
    data, texts = tmp_path / "data", read_text(parallel / "test.de")
    assert "VOCABULARY is 999; " in prepare(programs, data, parallel, fails=True, VOCABULARY=999, SUBWORDS="bpe")
    prepare(programs, data, parallel, VOCABULARY=60, SUBWORDS="bpe")
    assert (data / "test.de").read_text().count("@-@") == 2
    # A generation that repeats the references, of which fairseq does not know two characters.
    lines = [line.replace("日 本", "<unk> <unk>") for line in read_text(data / "test.de")]
    (data / "checkpoint_best.pt").touch()
    generate(programs, data, data, [*(f"H-{n}\t0\t{line}\n" for n, line in enumerate(lines)), SUMMARY])
    assert read_text(data / "generate-test.hyp") == [x.replace("日本", "<unk> <unk>") for x in texts]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_row_is_trained_and_scored_by_the_ledgers_commands(parallel: Path, tmp_path: Path, reproduce) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    run_script(PREPARE, data, parallel, VOCABULARY=360, LC_ALL="C")
    small = [*TINY["wmt14"].split(), *"--max-update 3 --validate-interval-updates 2 --log-interval 1".split()]
    said, _ = reproduce("run", "multi30k", data, out, "--rows", "dpfp", "--seeds", "1", "--", *small)
    assert "dpfp: about 0.0 hours for each of seeds 1\n" in said
    (found,) = ledger.read_ledger(out / "ledger.jsonl")
    assert [update for update, _ in found.valid] == [2, 3] and set(found.scores) == {"valid BLEU", "test BLEU"}
    assert found.parameters > 0 and found.code and found.words_per_second > 0 and found.memory_gib > 0.1
    assert " on the CPU" in found.backends[0] and found.commands[1].endswith("generate.sh DATA OUT --cpu")
