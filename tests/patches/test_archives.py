"""A model's archive is unpacked whole, beside nothing else, and stays."""

import io
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from fairseq import file_utils


@pytest.fixture(autouse=True)
def cache(our_fairseq, tmp_path, monkeypatch):
    monkeypatch.setattr(file_utils, "PYTORCH_FAIRSEQ_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def write(path, *members, mode="w:gz"):
    """An archive of files, by their names, or of members."""
    with tarfile.open(path, mode) as archive:
        for member in members:
            if isinstance(member, str):
                member = tarfile.TarInfo(member)
                member.size = 5
            archive.addfile(member, io.BytesIO(b"bytes") if member.isfile() else None)
    return str(path)


def member(name, kind, target=""):
    found = tarfile.TarInfo(name)
    found.type, found.linkname = kind, target
    return found


@pytest.mark.parametrize("has_filter", [True, False])
@pytest.mark.parametrize(
    ("name", "mode", "members", "files"),
    [
        ("m.tar.gz", "w:gz", ("m/model.pt", "m/data/dict.txt"), ("data/dict.txt", "model.pt")),
        ("m.tar", "w", (member("./", tarfile.DIRTYPE), "./model1.pt", "./model2.pt"), ("model1.pt", "model2.pt")),
        ("m", "w:bz2", ("a/model.pt",), ("model.pt",)),
        ("m.tar.xz", "w:xz", ("model.pt", "data/dict.txt"), ("data/dict.txt", "model.pt")),
    ],
)
def test_an_archive_is_unpacked_once_and_stays(tmp_path, cache, monkeypatch, has_filter, name, mode, members, files):
    if not has_filter:
        monkeypatch.delattr(tarfile, "data_filter")
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


@pytest.mark.parametrize("has_filter", [True, False])
@pytest.mark.parametrize(
    "hostile",
    [
        *("../out", "a/../../../out", "/tmp/fairseq-archive-out", "a/..//../../out"),
        *(member("a/link", kind, "../../out") for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE)),
        member("a/link", tarfile.SYMTYPE, "b"),
        *(member("a/device", kind) for kind in (tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE)),
    ],
)
def test_what_leads_out_of_an_archive_is_refused(tmp_path, cache, monkeypatch, has_filter, hostile):
    if not has_filter:
        monkeypatch.delattr(tarfile, "data_filter")
    archive = write(tmp_path / "m.tar.gz", "a/model.pt", hostile)
    with pytest.raises(ValueError, match=r"^\S*m\.tar\.gz cannot be unpacked: '.*' (is no file|would be written)"):
        file_utils.load_archive_file(archive)
    assert not list(cache.iterdir())
    assert not Path("/tmp/fairseq-archive-out").exists() and not (tmp_path / "out").exists()


def test_a_part_of_an_archive_does_not_pass_for_the_whole(tmp_path, cache, monkeypatch):
    archive = write(tmp_path / "m.tar.gz", "a/one", "a/two")
    whole = Path(archive).read_bytes()
    for damaged in (whole[:-20], whole[:30], b"text", b""):
        Path(archive).write_bytes(damaged)
        with pytest.raises(ValueError, match=r"^\S*m\.tar\.gz cannot be unpacked: "):
            file_utils.load_archive_file(archive)
    Path(archive).write_bytes(whole)
    extractall = tarfile.TarFile.extractall

    def cut_off(self, path, **options):
        extractall(self, path, members=[self.getmember("a/one")], **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(tarfile.TarFile, "extractall", cut_off)
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
