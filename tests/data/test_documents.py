"""Documents: where they begin, in whatever samples they are read."""

from __future__ import annotations

import itertools

import pytest
import torch
from fairseq.data import Dictionary, MonolingualDataset, TokenBlockDataset

from fairseq_fastweights.data.documents import Documents, PackedDocuments
from fairseq_fastweights.data.segment_streams import SegmentStreams
from fairseq_fastweights.data.sliding_windows import SlidingWindows
from tests.data.test_corpus_readers import EOS, PAD, Lines, corpus_of

# Lines, of which those of one token end documents, and where documents begin in the text.
LINES = [
    ((3, 1, 2), [0, 4]),
    ((3, 2, 1), [0]),
    ((1, 3, 1, 1, 1, 2, 1), [0, 1, 7]),
    ((1, 1), [0]),
    ((4, 0, 1, 0, 5, 1, 0), [0, 5]),
    ((4, 1, 3, 2, 1, 1, 7, 1, 9), [0, 5, 12, 20]),
]
LONG = LINES[-1]


@pytest.mark.parametrize(("sizes", "begins"), LINES)
def test_a_document_begins_after_empty_lines_and_ends_with_the_last_of_them(sizes, begins):
    documents = Documents(corpus_of(*sizes))
    assert documents.bounds.tolist() == [*begins, sum(sizes)] and len(documents) == len(begins)
    for start, stop in itertools.combinations_with_replacement(range(sum(sizes) + 1), 2):
        assert documents.starts(start, stop).tolist() == [token in begins for token in range(start, stop)]


def test_a_text_without_empty_lines_is_refused_by_name():
    with pytest.raises(ValueError, match="separate_documents is set, but split 'train' has no empty line"):
        Documents(corpus_of(3, 2))


def blocks_of(sizes: tuple[int, ...], length: int, mode: str, rows: int) -> MonolingualDataset:
    lines, words = Lines(*sizes), Dictionary()
    blocks = TokenBlockDataset(lines, lines.sizes, length, PAD, EOS, break_mode=mode, include_targets=True)
    return MonolingualDataset(blocks, blocks.sizes, words, targets=["future"], shuffle=True, pad_to_bsz=rows)


def begins_in(batch: dict) -> list[int]:
    """The tokens, by where they stand in the text, that the batch says begin a document."""
    starts = batch["net_input"]["starts"]
    assert starts.dtype == torch.bool and starts.shape == batch["net_input"]["src_tokens"].shape
    return (batch["target"][starts] - 10).tolist()


@pytest.mark.parametrize("mode", ["none", "complete"])
@pytest.mark.parametrize("length", [1, 4, 7, 100])
@pytest.mark.filterwarnings("ignore:overflow encountered")  # of fairseq, for targets that nobody asks for
@pytest.mark.parametrize(("sizes", "begins"), [case for case in LINES if 0 not in case[0]])  # which fairseq cannot cut
def test_blocks_say_where_documents_begin(sizes, begins, length, mode):
    plain = blocks_of(sizes, length, mode, rows=3)
    data = PackedDocuments(plain, Documents(corpus_of(*sizes)))
    order = data.ordered_indices().tolist()  # shuffled
    found = []
    for rows in (order[i : i + 2] for i in range(0, len(order), 2)):  # with a row of padding
        batch, same = (source.collater([source[i] for i in rows]) for source in (data, plain))
        found += begins_in(batch)
        assert batch["net_input"].keys() - same["net_input"].keys() == {"starts"}
        assert torch.equal(batch["target"], same["target"])
    assert sorted(found) == begins
    assert data.collater([]) == {}


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("length", [1, 4, 100])
def test_streams_say_where_documents_begin(streams, length):
    sizes, begins = LONG
    corpus = corpus_of(*sizes)
    data, plain = (SegmentStreams(corpus, streams, length, PAD, *more) for more in ([Documents(corpus)], []))
    found = []
    for rows in data.batches(1):
        batch, same = (source.collater([source[i] for i in rows]) for source in (data, plain))
        found += begins_in(batch)
        assert set(same["net_input"]) == {"src_tokens", "src_lengths", "continues"}
        assert all(torch.equal(x, batch["net_input"][name]) for name, x in same["net_input"].items())
    assert sorted(found) == begins


@pytest.mark.parametrize(("new", "context"), [(1, 7), (1, 1), (3, 5), (4, 4), (7, 1), (40, 2)])
@pytest.mark.parametrize(("sizes", "begins"), LINES)
def test_each_document_has_the_windows_that_it_has_alone(sizes, begins, new, context):
    data = SlidingWindows(corpus_of(*sizes), new, context, Documents(corpus_of(*sizes)))
    scored: dict[int, list[int]] = {}
    batches = data.batches(max_windows=4)
    assert sorted(itertools.chain(*batches)) == list(range(len(data)))
    for rows in batches:
        assert len(rows) <= 4
        batch = data.collater([data[i] for i in rows])
        for inputs, targets in zip(batch["net_input"]["src_tokens"].tolist(), batch["target"].tolist(), strict=True):
            for i, target in enumerate(targets):
                assert target not in scored
                scored[target] = inputs[: len(inputs) - len(targets) + i + 1]
    for begin, end in itertools.pairwise([*begins, sum(sizes)]):
        alone = SlidingWindows(corpus_of(end - begin), new, context)
        for sample in map(alone.__getitem__, range(len(alone))):
            inputs, targets = sample["source"].tolist(), sample["target"].tolist()
            for i, target in enumerate(targets):
                read = inputs[: len(inputs) - len(targets) + i + 1]
                before = EOS if begin == 0 else begin + 9  # the token before, which ends a line
                assert scored.pop(target + begin) == [before if x == EOS else x + begin for x in read]
    assert not scored
