"""examples/wmt14/prepare.sh without a folder: a download goes on where it was cut off, and is what it should be."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tarfile
from pathlib import Path

import pytest

from tests.examples.wmt14.conftest import PREPARE, Programs, contents, corpus

needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")


@pytest.fixture
def served(parallel: Path, tmp_path: Path) -> dict[str, object]:
    """An environment in which the WMT14 set is small: where it is downloaded from, and checksums that fit."""
    archives = {
        "wmt13/training-parallel-europarl-v7.tgz": ("training/europarl-v7.de-en", slice(0, 100)),
        "wmt13/training-parallel-commoncrawl.tgz": ("commoncrawl.de-en", slice(100, 200)),
        "wmt14/training-parallel-nc-v9.tgz": ("training/news-commentary-v9.de-en", slice(200, 300)),
    }
    script = PREPARE.read_text()
    sums = []
    for path, (member, part) in archives.items():
        archive = tmp_path / "served" / path
        archive.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive, "w:gz") as tar:
            for language in ("en", "de"):
                text = tmp_path / "member"
                text.write_text("".join(f"{x}\n" for x in corpus.read_text(parallel / f"train.{language}")[part]))
                tar.add(text, f"{member}.{language}")
        asked = re.search(rf"fetch {re.escape(path)} \d+ \\\n +([0-9a-f]{{64}})\n", script)
        assert asked is not None
        sums.append(f"{hashlib.sha256(archive.read_bytes()).hexdigest()} {asked[1]}\n")
    (tmp_path / "sums").write_text("".join(sums))
    for name, split in (("wmt13", "valid"), ("wmt14/full", "test")):
        for side, language in (("src", "en"), ("ref", "de")):
            (tmp_path / "sets" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(parallel / f"{split}.{language}", tmp_path / "sets" / f"{name}.{side}")
    url = (tmp_path / "served").as_uri()
    return {"WMT14_URL": url, "SUMS": tmp_path / "sums", "SETS": tmp_path / "sets"}


@needs_curl
def test_wmt14_is_downloaded_and_a_download_that_was_cut_off_goes_on(
    served: dict[str, object], stub_data: Path, tmp_path: Path, programs: Programs
) -> None:
    out, whole = tmp_path / "out", tmp_path / "served" / "wmt13" / "training-parallel-europarl-v7.tgz"
    gone = programs.prepare(out, **{**served, "WMT14_URL": (tmp_path / "nowhere").as_uri()})
    assert gone.returncode == 1 and "cannot download" in gone.stderr and not out.exists()
    part = tmp_path / "out.unfinished" / "downloads" / f"{whole.name}.part"
    part.parent.mkdir(parents=True, exist_ok=True)
    content = whole.read_bytes()
    part.write_bytes(content[:1000])
    whole.write_bytes(b"\0" * 1000 + content[1000:])  # what has come must not be fetched again
    no_set = programs.prepare(out, **{**served, "SETS": tmp_path / "nowhere"})
    assert no_set.returncode == 1 and "sacrebleu cannot fetch wmt13" in no_set.stderr and not out.exists()
    assert (part.parent / whole.name).read_bytes() == content
    shutil.rmtree(tmp_path / "served")  # all of it has come
    result = programs.prepare(out, **served)
    assert result.returncode == 0 and "downloading" not in result.stdout, result.stderr
    assert not (tmp_path / "out.unfinished").exists()
    # The same text as from a folder.
    ours, theirs = contents(out), contents(stub_data)
    made = [json.loads(files.pop("preparation.json"))["made from"].pop("text") for files in (ours, theirs)]
    assert made[0] == "WMT14 training set, newstest2013, newstest2014" and ours == theirs
    again = programs.prepare(out, **served)
    assert again.returncode == 0 and again.stdout == f"{out} is finished\n"
