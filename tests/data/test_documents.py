"""Documents: where they begin, in whatever samples they are read."""

import itertools

import pytest
import torch
from fairseq.data import Dictionary, MonolingualDataset, TokenBlockDataset

from fairseq_fastweights.data.corpus import Documents, PackedDocuments
from fairseq_fastweights.data.segment_streams import SegmentStreams
from fairseq_fastweights.data.sliding_windows import SlidingWindows
from tests.data.test_corpus_readers import EOS, PAD, Lines, corpus_of, read_before

# Lines, of which those of one token end documents, and where documents begin in the text.
LINES = [
    ((3, 1, 2), [0, 4]),
    ((3, 2, 1), [0]),
    ((1, 3, 1, 1, 1, 2, 1), [0, 1, 7]),
    ((1, 1), [0]),
    ((4, 0, 1, 0, 5, 1, 0), [0, 5]),
    ((4, 1, 3, 2, 1, 1, 7, 1, 9), [0, 5, 12, 20]),
]


@pytest.mark.parametrize(("sizes", "begins"), LINES)
def test_a_document_begins_after_empty_lines_and_ends_with_the_last(sizes, begins):
    documents = Documents(corpus_of(*sizes))
    assert documents.bounds.tolist() == [*begins, sum(sizes)] and len(documents) == len(begins)
    for start, stop in itertools.combinations_with_replacement(range(sum(sizes) + 1), 2):
        assert documents.starts(start, stop).tolist() == [token in begins for token in range(start, stop)]
    with pytest.raises(ValueError, match="separate_documents is set, but split 'train' has no empty line"):
        Documents(corpus_of(3, 2))


@pytest.mark.parametrize("reader", ["none", "complete", 1, 3])  # break modes, or streams
@pytest.mark.parametrize("length", [1, 4, 7, 100])
@pytest.mark.filterwarnings("ignore:overflow encountered")  # of fairseq, for targets that nobody asks for
@pytest.mark.parametrize(("sizes", "begins"), [case for case in LINES if 0 not in case[0]])  # which fairseq cannot cut
def test_blocks_and_streams_say_where_documents_begin(sizes, begins, length, reader):
    corpus, lines = corpus_of(*sizes), Lines(*sizes)
    if isinstance(reader, int):
        streams = min(reader, len(corpus))
        data, plain = (SegmentStreams(corpus, streams, length, PAD, *more) for more in ([Documents(corpus)], []))
        batches = data.batches(1)
    else:
        blocks = TokenBlockDataset(lines, lines.sizes, length, PAD, EOS, break_mode=reader, include_targets=True)
        more = {"targets": ["future"], "shuffle": True, "pad_to_bsz": 3}  # with a row of padding
        plain = MonolingualDataset(blocks, blocks.sizes, Dictionary(), **more)
        data = PackedDocuments(plain, Documents(corpus))
        order = data.ordered_indices().tolist()  # shuffled
        batches = [order[i : i + 2] for i in range(0, len(order), 2)]
    found = []
    for rows in batches:
        batch, same = (source.collater([source[i] for i in rows]) for source in (data, plain))
        starts = batch["net_input"].pop("starts")
        assert starts.dtype == torch.bool and starts.shape == batch["net_input"]["src_tokens"].shape
        found += (batch["target"][starts] - 10).tolist()  # by where they stand in the text
        assert batch["net_input"].keys() == same["net_input"].keys()
        assert all(torch.equal(x, batch["net_input"][name]) for name, x in same["net_input"].items())
        assert torch.equal(batch["target"], same["target"])
    assert sorted(found) == begins and data.collater([]) == {}


@pytest.mark.parametrize(("new", "context"), [(1, 7), (1, 1), (3, 5), (4, 4), (7, 1), (40, 2)])
@pytest.mark.parametrize(("sizes", "begins"), LINES)
def test_each_document_has_the_windows_that_it_has_alone(sizes, begins, new, context):
    corpus = corpus_of(*sizes)
    read = read_before(SlidingWindows(corpus, new, context, Documents(corpus)))
    for begin, end in itertools.pairwise([*begins, sum(sizes)]):
        before = EOS if begin == 0 else begin + 9  # the token before, which ends a line
        for target, alone in read_before(SlidingWindows(corpus_of(end - begin), new, context)).items():
            assert read.pop(target + begin) == [before if x == EOS else x + begin for x in alone]
    assert not read
