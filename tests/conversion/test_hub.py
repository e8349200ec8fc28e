"""Models by their names: the files that are fetched, from the hub or its cache, and the errors."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from fairseq_fastweights.conversion import hub as hub_module
from fairseq_fastweights.conversion.__main__ import main
from tests.conversion import llamas

NAME, COMMIT = "some/model", "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """A hub with one model: the answers of `huggingface_hub`, and its cache on the disk."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self.cache = folder, cache
        self.fails: Exception | None = None
        self.calls: list[tuple[Any, ...]] = []

    def snapshot(self) -> Path:
        return self.cache / f"models--{NAME.replace('/', '--')}" / "snapshots" / COMMIT

    def model_info(self, name: str, revision: str | None, files_metadata: bool) -> Any:
        self.calls.append(("info", name, revision))
        if self.fails is not None:
            raise self.fails
        paths = {path.relative_to(self.folder).as_posix(): path for path in self.folder.rglob("*") if path.is_file()}
        files = [SimpleNamespace(rfilename=name, size=path.stat().st_size) for name, path in paths.items()]
        return SimpleNamespace(sha=COMMIT, siblings=files)

    def snapshot_download(self, name: str, *, revision: str, allow_patterns=None, local_files_only=False) -> str:
        self.calls.append(("fetch", revision, allow_patterns, local_files_only))
        if not local_files_only:
            self.snapshot().mkdir(parents=True, exist_ok=True)
            for file in allow_patterns:
                blob = self.snapshot().parents[1] / "blobs" / file.replace(".", "").replace("/", "")
                blob.parent.mkdir(exist_ok=True)
                shutil.copy(self.folder / file, blob)
                (self.snapshot() / file).parent.mkdir(exist_ok=True)
                (self.snapshot() / file).symlink_to(blob)
        if not self.snapshot().is_dir():
            raise errors.LocalEntryNotFoundError("nothing of it is there")
        return str(self.snapshot())

    def try_to_load_from_cache(self, name: str, file: str, revision: str) -> str | None:
        path = self.snapshot() / file
        return str(path) if path.is_file() else None


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = llamas.save(tmp_path_factory.mktemp("hub") / "model", llamas.model("Llama"), shards=2)
    (made / "additional_chat_templates").mkdir()
    for name in ("chat_template", "additional_chat_templates/tool_use"):
        (made / f"{name}.jinja").write_text("{{ messages }}")
    return made


@pytest.fixture
def hub(folder, tmp_path, monkeypatch) -> Hub:
    there = tmp_path / "there"
    shutil.copytree(folder, there)
    for other in ("pytorch_model.bin", "model-00001-of-00002.gguf", "README.md", "consolidated.safetensors", "a.jinja"):
        (there / other).write_bytes(b"not to be fetched")
    made = Hub(there, tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: made)
    for name in ("snapshot_download", "try_to_load_from_cache"):
        monkeypatch.setattr(huggingface_hub, name, getattr(made, name))
    monkeypatch.chdir(tmp_path)
    return made


def test_a_name_is_listed_fetched_and_found_again_without_a_network(hub, folder, capsys):
    files = [path for path in folder.rglob("*") if path.is_file()]
    needed = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    assert sum("of-0000" in name for name in needed) > 1
    assert main(["from-huggingface", NAME, "ours", "--revision", "v1", "--dry-run"]) == 0
    head, *rows, total = capsys.readouterr().out.splitlines()
    assert head == f"{NAME} at {COMMIT}:" and {row.split()[-1] for row in rows} == set(needed)
    size = sum(needed.values()) / 1000
    assert total == f"to be fetched: {size:.3g} kB" and not Path("ours").exists()
    assert hub.calls == [("info", NAME, "v1")]

    assert main(["from-huggingface", NAME, "ours", "--revision", "v1"]) == 0
    # That commit and nothing else: the branch may have moved since it was listed.
    assert hub.calls[-1][1] == COMMIT and set(hub.calls[-1][2]) == set(needed)
    assert main(["from-huggingface", str(folder), "from-folder"]) == 0
    for name in ("dict.txt", "huggingface/additional_chat_templates/tool_use.jinja"):
        assert (Path("ours") / name).read_bytes() == (Path("from-folder") / name).read_bytes()

    assert main(["from-huggingface", NAME, "again", "--dry-run"]) == 0
    assert "to be fetched: 0 B" in capsys.readouterr().out
    hub.fails = ConnectionError("no route to host")
    assert main(["from-huggingface", NAME, "again"]) == 0
    assert hub.calls[-1] == ("fetch", None, None, True)


def test_shards_may_have_the_ending_twice():
    shards = [f"model.safetensors-0000{i}-of-00002.safetensors" for i in (1, 2)]
    others = ["consolidated-00001-of-00002.safetensors", "model.safetensors.index.json"]
    assert hub_module._weights(dict.fromkeys([*shards, *others], 1)) == ["model.safetensors.index.json", *shards]


def answered(kind: type[Exception], status: int = 404) -> Exception:
    """An error of the hub's, with its answer."""
    error = kind.__new__(kind)
    Exception.__init__(error, f"{status} says the hub\nand more")
    error.response = SimpleNamespace(status_code=status)  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        (ConnectionError("no route to host\n"), "the hub cannot be reached (no route to host); nor is it in the cache"),
        (errors.OfflineModeIsEnabled("offline mode is enabled."), "cannot be reached (offline mode is enabled); nor i"),
        (answered(errors.RepositoryNotFoundError), "there is no such folder, and the hub has no such model, or none"),
        (answered(errors.GatedRepoError), "conditions must be accepted first, at https://huggingface.co/some/model;"),
        (answered(errors.RevisionNotFoundError), "revision is 'v1'; the hub has no such branch, tag or commit of it"),
        (answered(errors.HfHubHTTPError, 503), "the hub answered 503 (503 says the hub)"),
        (
            errors.HFValidationError("no -- in names"),
            "SOURCE must be a folder, a GGUF file, or a model's name on the hub; no -- in",
        ),
    ],
)
def test_errors_of_the_hub_are_one_line(hub, capsys, fails, message):
    hub.fails = fails
    assert main(["from-huggingface", NAME, "ours", "--revision", "v1"]) == 2
    error = capsys.readouterr().err
    assert f"error: {NAME}: " in error and message in error and len(error.splitlines()) == 1
    assert not Path("ours").exists()


def test_a_folder_comes_first_and_has_no_revision(hub, folder, capsys):
    shutil.copytree(folder, NAME)
    assert main(["from-huggingface", NAME, "ours"]) == 0 and hub.calls == []
    for option in (["--revision", "v1"], ["--dry-run"]):
        assert main(["from-huggingface", NAME, "other", *option]) == 2
        assert f"{option[0]} is given and SOURCE is {NAME}; with it SOURCE must" in capsys.readouterr().err
    assert main(["from-huggingface", "no/such/folder", "other"]) == 2
    assert "no/such/folder: SOURCE must be a folder, a GGUF file, or a model's name" in capsys.readouterr().err
    Path("ours2").mkdir()
    assert main(["from-huggingface", "another/model", "ours2"]) == 2 and hub.calls == []
    assert "TARGET exists" in capsys.readouterr().err


def test_a_model_without_weights_or_with_half_of_its_shards_is_refused(hub, capsys):
    shard = max(hub.folder.glob("model-*.safetensors"))
    shard.unlink()
    assert main(["from-huggingface", NAME, "ours"]) == 2
    assert f"missing: {shard.name}" in capsys.readouterr().err and not Path("ours").exists()
