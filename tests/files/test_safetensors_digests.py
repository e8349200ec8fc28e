"""Weights in a file of safetensors that are not those that its digest is of are refused."""

import os
import struct
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from fairseq_fastweights.files.safetensors_digests import note_digest, why_damaged

WEIGHTS = {"b": torch.arange(6.0).view(2, 3), "a": torch.ones(3).bfloat16(), "none": torch.ones(0, 2)}


@pytest.fixture
def path(tmp_path) -> Path:
    save_file(WEIGHTS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


def digest(path: Path) -> str | None:
    with safe_open(path, "pt") as file:
        assert file.metadata()["format"] == "pt"
        return file.metadata().get("digest")


def test_a_digest_is_noted_and_nothing_else_is_changed(path):
    assert why_damaged(path) is None and digest(path) is None  # as of other people's files
    elsewhere = path.parents[1] / "elsewhere"
    elsewhere.write_text("kept")
    path.with_name("model.safetensors.tmp").symlink_to(elsewhere)
    note_digest(path)
    assert elsewhere.read_text() == "kept"
    found = load_file(path)
    assert found.keys() == WEIGHTS.keys() and all(torch.equal(x, WEIGHTS[name]) for name, x in found.items())
    assert why_damaged(path) is None and [x.name for x in path.parent.iterdir()] == [path.name]
    first = digest(path)
    assert first == "dadf97d118c3a509"  # another would refuse all files that were written before
    save_file(dict(reversed(WEIGHTS.items())), path, metadata={"format": "pt"})
    note_digest(path)
    assert digest(path) == first
    for change in (
        {"b": WEIGHTS["b"] + 1},
        {"b": WEIGHTS["b"].view(3, 2)},
        {"a": torch.ones(3).half()},
        {"c": torch.ones(1)},
    ):
        save_file(WEIGHTS | change, path, metadata={"format": "pt"})
        note_digest(path)
        assert digest(path) != first


def test_a_flipped_bit_is_noticed_or_changes_nothing(path):
    note_digest(path)
    content = path.read_bytes()
    missed = 0
    with path.open("r+b", buffering=0) as file:
        for bit in range(0, len(content) * 8, 3):
            for written in (content[bit // 8] ^ 1 << bit % 8, content[bit // 8]):
                file.seek(bit // 8)
                file.write(bytes([written]))
                if written == content[bit // 8] or why_damaged(path) is not None:
                    continue
                missed += 1
                with suppress(SafetensorError):  # it minds other things, as the order of the tensors
                    found = load_file(path)
                    assert found.keys() == WEIGHTS.keys()
                    assert all(torch.equal(x, WEIGHTS[name]) for name, x in found.items())
    # The key "digest" itself, and other metadata as "format", are not covered.
    assert missed < len(content) * 8 / 3 / 4


def test_short_files_absurd_sizes_and_other_kinds_are_told(path):
    note_digest(path)
    content = path.read_bytes()
    for size in range(len(content)):
        path.write_bytes(content[:size])
        assert why_damaged(path) == "is cut short or damaged: its header does not fit its size"
    for header in (b"[]", b"{", b'{"__metadata__":{"digest":"x"},"a":{}}', b'{"__metadata__":3}', b"[" * 10**5):
        path.write_bytes(struct.pack("<Q", len(header)) + header)
        assert why_damaged(path) == "is cut short or damaged: its header does not fit its size"
    path.write_bytes(struct.pack("<Q", 2**60) + content[8:])
    assert why_damaged(path) == "is cut short or damaged: its header does not fit its size"
    path.unlink()
    os.mkfifo(path)
    assert why_damaged(path) == "is a pipe; it must be a regular file"
