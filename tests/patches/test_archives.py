"""A model's archive is unpacked whole, beside nothing else, and stays."""

import bz2
import gzip
import io
import lzma
import shutil
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from fairseq import file_utils

archives = pytest.importorskip("fairseq.archives", reason="needs tools/build_fairseq.py's fairseq")


@pytest.fixture(autouse=True)
def cache(our_fairseq, tmp_path, monkeypatch):
    monkeypatch.setattr(file_utils, "PYTORCH_FAIRSEQ_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def write(path, *members, mode="w:gz", content=b"bytes"):
    """An archive of files, by their names, or of members."""
    with tarfile.open(path, mode) as archive:
        for member in members:
            if isinstance(member, str):
                member = tarfile.TarInfo(member)
                member.size = 5
            archive.addfile(member, io.BytesIO(content) if member.isfile() else None)
    return str(path)


def member(name, kind, target="", headers=None):
    found = tarfile.TarInfo(name)
    found.type, found.linkname, found.pax_headers = kind, target, headers or {}
    found.size = 5 if headers else 0
    return found


@pytest.mark.parametrize(
    ("name", "mode", "members", "files"),
    [
        ("m.tar.gz", "w:gz", ("m/model.pt", "m/data/dict.txt"), ("data/dict.txt", "model.pt")),
        ("m.tar", "w", (member("./", tarfile.DIRTYPE), "./model1.pt", "./model2.pt"), ("model1.pt", "model2.pt")),
        ("m", "w:bz2", ("a/model.pt",), ("model.pt",)),
        ("m.tar.xz", "w:xz", ("model.pt", "data/dict.txt"), ("data/dict.txt", "model.pt")),
    ],
)
def test_an_archive_is_unpacked_once_and_stays(tmp_path, cache, monkeypatch, name, mode, members, files):
    archive = write(tmp_path / name, *members, mode=mode)
    before = Path(archive).read_bytes()
    folder = Path(file_utils.load_archive_file(archive))
    assert tuple(sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())) == files
    with monkeypatch.context() as patched:
        patched.setattr(tarfile, "open", None)
        assert file_utils.load_archive_file(archive) == str(folder) and Path(archive).read_bytes() == before
    write(Path(archive), "other", mode=mode)
    assert [path.name for path in Path(file_utils.load_archive_file(archive)).iterdir()] == ["other"]
    assert file_utils.load_archive_file(str(folder)) == str(folder)  # a folder is taken as it is
    assert all(path.name.startswith("unpacked-") for path in cache.iterdir())


FOLDER = "'.*' would need a file to be a folder, too"


@pytest.mark.parametrize(
    ("members", "message"),
    [
        *((name, "'.*' would be written") for name in ("../out", "a/../../../out", "/tmp/fairseq-archive-out")),
        *(
            (member("a/link", kind, "../../out"), "'a/link' is no file or")
            for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE)
        ),
        *(
            (member("a/dev", kind), "'a/dev' is no file or")
            for kind in (tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE)
        ),
        (
            member("a/sparse", tarfile.REGTYPE, headers={"GNU.sparse.map": "0,1", "GNU.sparse.size": str(2**40)}),
            "'a/spars",
        ),
        (member("a/x", tarfile.REGTYPE, headers={"size": str(2**62)}), "it would become more than 100 times as large"),
        (member("a/x", tarfile.REGTYPE, headers={"size": "-512"}), ""),
        (member("a/x", tarfile.REGTYPE, headers={"size": "9" * 5000}), "it is cut short, damaged or no archive"),
        (
            member("a/x", tarfile.REGTYPE, headers={"comment": "c" * 10**6}),
            "it would become more than 100 times as large",
        ),
        ("/".join("a" * 1500), "'a/a/.*' has more than 255 bytes"),
        ("b" * 999, "'b*' has more than 255 bytes"),
        (member(".", tarfile.REGTYPE), FOLDER),
        ("a/model.pt/b", FOLDER),
        (member("a/model.pt", tarfile.DIRTYPE), FOLDER),
        ("a", FOLDER),
        ("./a/model.pt", "'./a/model.pt' is there twice"),
    ],
    ids=range(20),
)
def test_what_an_archive_may_not_hold_is_refused(tmp_path, cache, members, message):
    archive = write(tmp_path / "m.tar.gz", "a/model.pt", members)
    with pytest.raises(ValueError, match=rf"^\S*m\.tar\.gz cannot be unpacked: {message}") as error:
        file_utils.load_archive_file(archive)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500
    assert not list(cache.iterdir())
    assert not Path("/tmp/fairseq-archive-out").exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
def test_an_archive_does_not_become_much_larger_than_it_is(tmp_path, cache, monkeypatch, mode):
    zeros = member("m/model.pt", tarfile.REGTYPE)
    zeros.size = 8 * 2**20
    archive = write(tmp_path / "m", zeros, mode=mode, content=bytes(zeros.size))
    packed = {"w:gz": gzip, "w:bz2": bz2, "w:xz": lzma}[mode]
    plain = write(tmp_path / "plain", "m/model.pt", mode="w")
    (tmp_path / "rest").write_bytes(packed.compress(Path(plain).read_bytes() + bytes(zeros.size)))  # behind its end
    many = write(tmp_path / "many", *"abcd")
    monkeypatch.setattr(archives, "_MOST", 3)
    for path, message in (archive, "100 times"), (tmp_path / "rest", "100 times"), (many, "3 files"):
        with pytest.raises(ValueError, match=f"cannot be unpacked: it .* more than {message}"):
            file_utils.load_archive_file(str(path))
        assert not list(cache.iterdir())


def test_a_part_of_an_archive_does_not_pass_for_the_whole(tmp_path, cache, monkeypatch):
    archive = write(tmp_path / "m.tar.gz", "a/one", "a/two")
    whole, plain = Path(archive).read_bytes(), gzip.decompress(Path(archive).read_bytes())
    folders = Path(write(tmp_path / "folders", member("a", tarfile.DIRTYPE))).read_bytes()
    broken = plain[:1024] + b"?" + plain[1025:]
    for damaged in (whole[:-20], whole[:30], b"text", b"", plain[:1024], broken, bytes(10_240), folders):
        Path(archive).write_bytes(damaged)
        with pytest.raises(ValueError, match=r"^\S*m\.tar\.gz cannot be unpacked: "):
            file_utils.load_archive_file(archive)
    Path(archive).write_bytes(whole)

    def cut_off(source, target):
        target.write(source.read(2))
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(shutil, "copyfileobj", cut_off)
        file_utils.load_archive_file(archive)
    assert not list(cache.iterdir())
    assert len(list(Path(file_utils.load_archive_file(archive)).iterdir())) == 2
    with pytest.raises(ValueError, match="is no regular file; it must be a folder or an archive"):
        file_utils.load_archive_file("/dev/null")


def test_a_download_that_is_cut_off_does_not_pass_for_the_file(cache, monkeypatch):
    head = SimpleNamespace(status_code=200, headers={"ETag": "1"})
    monkeypatch.setattr(file_utils, "request_wrap_timeout", lambda *_: head)
    monkeypatch.setattr(file_utils, "http_get", lambda url, file: file.write(b"whole"))

    def cut_off(source, target):
        target.write(source.read(2))
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(file_utils.shutil, "copyfileobj", cut_off)
        file_utils.cached_path("https://models/m.tar.gz")
    assert Path(file_utils.cached_path("https://models/m.tar.gz")).read_bytes() == b"whole"
