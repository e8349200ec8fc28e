"""Batches of the data sets: every token is predicted once, and in which context."""

import itertools

import numpy as np
import pytest
import torch
from fairseq.data import Dictionary, TruncatedDictionary

from fairseq_fastweights.data.corpus import TokenCorpus
from fairseq_fastweights.data.segment_streams import SegmentStreams
from fairseq_fastweights.data.sliding_windows import SlidingWindows

EOS, PAD = 2, 1


class Lines(list):
    """An indexed data set of tokens that count up from 10: each says where it stands. Some must be prefetched first."""

    def __init__(self, *sizes: int, supports_prefetch: bool = False) -> None:
        super().__init__(torch.arange(a, b) + 10 for a, b in itertools.pairwise(np.cumsum([0, *sizes])))
        self.sizes, self.supports_prefetch, self.prefetched = np.array(sizes), supports_prefetch, range(0)

    def prefetch(self, indices: range) -> None:
        self.prefetched = indices

    def __getitem__(self, index: int) -> torch.Tensor:
        assert not self.supports_prefetch or index in self.prefetched
        return super().__getitem__(index)


def corpus_of(*sizes: int, **flags: bool) -> TokenCorpus:
    return TokenCorpus(Lines(*sizes, **flags), eos=EOS, name="train")


def test_a_corpus_is_its_lines_end_to_end_and_inputs_are_the_tokens_before():
    corpus = corpus_of(3, 0, 1, 4, 0)
    assert len(corpus) == 8 and corpus.num_tokens(3) == corpus.size(3) == 1
    for start in range(9):
        for stop in range(start, 9):
            assert corpus.read(start, stop).tolist() == list(range(10 + start, 10 + stop))
            assert corpus.read_inputs(start, stop).tolist() == [EOS, *range(10, 17)][start:stop]


def test_targets_without_an_output_are_unknown_words_and_inputs_keep_them():
    words = Dictionary(extra_special_symbols=[f"w{number}" for number in range(10)])
    corpus = TokenCorpus(Lines(3, 3), EOS, "train", output_dictionary=TruncatedDictionary(words, 12))
    sample = SegmentStreams(corpus, 1, 6, PAD)[0]
    assert sample["target"].tolist() == [10, 11, *[words.unk()] * 4]
    assert sample["source"].tolist() == [EOS, 10, 11, 12, 13, 14]


@pytest.mark.parametrize(("reader", "options"), [(SegmentStreams, (2, 4, PAD)), (SlidingWindows, (4, 4))])
def test_readers_prefetch_lines_that_must_be(reader, options):
    data = reader(corpus_of(5, 0, 20, 7, supports_prefetch=True), *options)
    assert torch.cat([data[i]["target"] for i in range(len(data))]).sort()[0].tolist() == list(range(10, 42))
    assert data.collater([]) == {}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *((lambda sizes=sizes: corpus_of(*sizes), "'train' holds no tokens") for sizes in ((), (0, 0))),
        (lambda: SegmentStreams(corpus_of(8), 9, 4, PAD), "batch size .* is 9, .* from 1 to 8"),
        (lambda: SegmentStreams(corpus_of(8), 2, 0, PAD), "tokens_per_sample is 0"),
        (lambda: SlidingWindows(corpus_of(8), 0, 3), "tokens_per_sample is 3 and context_window 3"),
        (lambda: SlidingWindows(corpus_of(8), 1, 0), "tokens_per_sample is 1 and context_window 0"),
    ],
)
def test_sizes_that_cannot_be_read_are_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(("processes", "rows", "added"), [(1, 6, 1), (3, 1, 2), (1, 2, 3), (2, 1, 3)])
def test_an_update_without_carried_states_reads_a_segment_of_every_stream(processes, rows, added):
    """However it is divided among processes and batches that are added up."""
    data = SegmentStreams(corpus_of(60), 6, 4, PAD, carried=False)
    batches = data.batches(processes * added)
    assert {len(batch) for batch in batches} == {rows}
    updates = []
    for process in range(processes):
        own = [data.collater([data[i] for i in batch]) for batch in batches[process::processes]]
        assert not any("continues" in sample["net_input"] for sample in own)
        updates.append([[s["target"].tolist() for s in own[i : i + added]] for i in range(0, len(own), added)])
    for number, update in enumerate(zip(*updates, strict=True)):
        found = sorted(row[0] for samples in update for sample in samples for row in sample)
        assert found == [10 + 10 * stream + 4 * number for stream in range(6)]


@pytest.mark.parametrize("tokens", [6, 23, 24, 25, 100])
@pytest.mark.parametrize(("processes", "rows"), [(1, 1), (1, 2), (2, 1), (3, 2)])
@pytest.mark.parametrize("length", [1, 4, 200])
def test_streams_cover_the_corpus_once_and_each_row_goes_on_where_it_was(tokens, processes, rows, length):
    data = SegmentStreams(corpus_of(5, tokens - 5), rows * processes, length, PAD)
    assert np.ptp(np.diff([start for [(start, _)] in data.rows] + [tokens])) <= 1
    batches = data.batches(processes)
    assert len(batches) % processes == 0  # no process runs out of batches before another
    seen: list[int] = []
    for process in range(processes):
        before: list[int | None] = [None] * rows
        # As fairseq's ShardedIterator deals batches out.
        for number, batch in enumerate(batches[process::processes]):
            sample = data.collater([data[i] for i in batch])
            tokens_in, targets = sample["net_input"]["src_tokens"], sample["target"]
            assert sample["net_input"]["continues"].tolist() == [number > 0] * rows
            assert targets.shape == (rows, max(1, int(targets.ne(PAD).sum(1).max())))
            assert torch.equal(tokens_in.eq(PAD), targets.eq(PAD)) and sample["ntokens"] == int(targets.ne(PAD).sum())
            for row in range(rows):
                real = targets[row][targets[row].ne(PAD)].tolist()
                if real:
                    assert tokens_in[row][0] == (EOS if real[0] == 10 else real[0] - 1)
                    assert before[row] in (None, real[0] - 1)
                    before[row] = real[-1]
                seen += real
    assert sorted(seen) == list(range(10, 10 + tokens))


def read_before(data: SlidingWindows) -> dict[int, list[int]]:
    """The inputs before each token that windows score; each is scored once."""
    read: dict[int, list[int]] = {}
    batches = data.batches(max_windows=4)
    assert sorted(itertools.chain(*batches)) == list(range(len(data))) and max(map(len, batches)) <= 4
    for batch in batches:
        sample = data.collater([data[i] for i in batch])
        inputs, targets = sample["net_input"]["src_tokens"].tolist(), sample["target"]
        assert sample["net_input"]["last_positions"] == targets.shape[1] and sample["ntokens"] == targets.numel()
        for row_in, row_out in zip(inputs, targets.tolist(), strict=True):
            for left, target in enumerate(reversed(row_out)):
                assert target not in read
                read[target] = row_in[: len(row_in) - left]
    return read


@pytest.mark.parametrize("tokens", [1, 5, 7, 8, 9, 40])
@pytest.mark.parametrize(("new", "context"), [(1, 7), (1, 1), (3, 5), (4, 4), (7, 1)])
def test_windows_score_every_token_once_in_the_context_of_fairseq(tokens, new, context):
    read = read_before(SlidingWindows(corpus_of(tokens), new, context))
    text = [EOS, *range(10, 10 + tokens)]
    # fairseq: blocks of `new` tokens, each after as many of the tokens before it as fit into `context`.
    assert read == {10 + i: text[max(0, i // new * new - context) : i + 1] for i in range(tokens)}


def test_windows_of_equal_length_are_read_together():
    for tokens, expected in ((16, [[0], [1, 2]]), (15, [[0], [1], [2]]), (5, [[0]])):
        assert SlidingWindows(corpus_of(tokens), new=4, context=4).batches(max_windows=4) == expected
