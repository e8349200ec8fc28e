"""What the data sets hand to a model: every token predicted once, and in which context."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from fairseq.data import Dictionary, TruncatedDictionary

from fairseq_fastweights.data.segment_streams import SegmentIterator, SegmentStreams
from fairseq_fastweights.data.sliding_windows import SlidingWindows
from fairseq_fastweights.data.token_corpus import TokenCorpus

EOS, PAD = 2, 1


class Lines(list):
    """An indexed data set of lines of tokens that count up from 10, so that each token says where it stands."""

    def __init__(self, sizes: list[int]) -> None:
        starts = np.cumsum([0, *sizes])
        super().__init__(torch.arange(a, b) + 10 for a, b in itertools.pairwise(starts))
        self.sizes = np.array(sizes)


def corpus_of(*sizes: int) -> TokenCorpus:
    return TokenCorpus(Lines(list(sizes)), eos=EOS, name="train")


def test_a_corpus_reads_across_lines_and_over_empty_ones():
    corpus = corpus_of(3, 0, 1, 4, 0)
    assert len(corpus) == 8 and corpus.num_tokens(3) == corpus.size(3) == 1
    for start in range(9):
        for stop in range(start, 9):
            assert corpus.read(start, stop).tolist() == list(range(10 + start, 10 + stop))


def test_inputs_are_the_tokens_before_and_the_first_is_the_line_end():
    corpus = corpus_of(3, 2)
    assert corpus.read_inputs(0, 3).tolist() == [EOS, 10, 11]
    assert corpus.read_inputs(2, 5).tolist() == [11, 12, 13]
    assert corpus.read_inputs(2, 2).tolist() == []


def test_targets_without_an_output_are_unknown_words_and_inputs_keep_them():
    words = Dictionary()
    for number in range(10):
        words.add_symbol(f"w{number}")
    corpus = TokenCorpus(Lines([3, 3]), EOS, "train", output_dictionary=TruncatedDictionary(words, 12))
    assert corpus.read_targets(0, 6).tolist() == [10, 11, *[words.unk()] * 4]
    assert corpus.read_inputs(0, 6).tolist() == [EOS, 10, 11, 12, 13, 14]
    sample = SegmentStreams(corpus, 1, 4, PAD)[0]
    assert sample["target"].tolist() == corpus.read_targets(0, 4).tolist()
    assert sample["source"].tolist() == corpus.read_inputs(0, 4).tolist()


class CachedLines(Lines):
    """Lines that can be read once they were prefetched, as those of fairseq's --dataset-impl cached."""

    supports_prefetch = True
    prefetched: frozenset[int] = frozenset()

    def prefetch(self, indices: range) -> None:
        self.prefetched = frozenset(indices)

    def __getitem__(self, index: int) -> torch.Tensor:
        assert index in self.prefetched
        return super().__getitem__(index)


@pytest.mark.parametrize("reader", ["streams", "windows"])
def test_lines_that_must_be_prefetched_are_by_what_reads_them(reader):
    lines = CachedLines([5, 0, 20, 7])
    corpus = TokenCorpus(lines, EOS, "train")
    assert not lines.prefetched
    data = SegmentStreams(corpus, 2, 4, PAD) if reader == "streams" else SlidingWindows(corpus, 4, 4)
    assert torch.cat([data[i]["target"] for i in range(len(data))]).sort()[0].tolist() == list(range(10, 42))


@pytest.mark.parametrize("sizes", [(), (0, 0)])
def test_an_empty_corpus_is_refused_by_name(sizes):
    with pytest.raises(ValueError, match="'train' holds no tokens"):
        corpus_of(*sizes)


@pytest.mark.parametrize("tokens", [6, 23, 24, 25, 100])
@pytest.mark.parametrize(("processes", "rows"), [(1, 1), (1, 2), (2, 1), (3, 2)])
@pytest.mark.parametrize("length", [1, 4, 200])
def test_streams_cover_the_corpus_once_and_each_row_goes_on_where_it_was(tokens, processes, rows, length):
    data = SegmentStreams(corpus_of(5, tokens - 5), rows * processes, length, PAD)
    batches = data.batches(processes)
    assert len(batches) % processes == 0  # no process runs out of batches before another
    seen: list[int] = []
    for process in range(processes):
        before = [None] * rows
        # As fairseq's ShardedIterator deals batches out.
        for number, batch in enumerate(batches[process::processes]):
            sample = data.collater([data[i] for i in batch])
            tokens_in, targets = sample["net_input"]["src_tokens"], sample["target"]
            assert tokens_in.shape[0] == rows
            assert sample["net_input"]["continues"].tolist() == [number > 0] * rows
            assert torch.equal(tokens_in.eq(PAD), targets.eq(PAD))
            assert sample["ntokens"] == int(targets.ne(PAD).sum())
            for row in range(rows):
                real = targets[row][targets[row].ne(PAD)].tolist()
                if real:
                    previous = tokens_in[row][0].item()
                    assert previous == (EOS if real[0] == 10 else real[0] - 1)
                    if before[row] is not None:
                        assert real[0] == before[row] + 1
                    before[row] = real[-1]
                seen += real
    assert sorted(seen) == list(range(10, 10 + tokens))


def test_streams_differ_by_one_token_at_most():
    data = SegmentStreams(corpus_of(101), 7, 3, PAD)
    lengths = np.diff(data.bounds)
    assert set(lengths) == {14, 15}


@pytest.mark.parametrize(("streams", "length", "what"), [(9, 4, "batch size"), (2, 0, "tokens_per_sample")])
def test_impossible_streams_are_refused(streams, length, what):
    with pytest.raises(ValueError, match=what):
        SegmentStreams(corpus_of(8), streams, length, PAD)


@pytest.mark.parametrize("tokens", [1, 5, 7, 8, 9, 40])
@pytest.mark.parametrize(("new", "context"), [(1, 7), (1, 1), (3, 5), (4, 4), (7, 1)])
def test_windows_score_every_token_once_in_the_context_that_fairseq_gives_it(tokens, new, context):
    data = SlidingWindows(corpus_of(tokens), new, context)
    scored = {}
    for batch in data.batches(max_windows=4):
        sample = data.collater([data[i] for i in batch])
        inputs, targets = sample["net_input"]["src_tokens"], sample["target"]
        assert sample["net_input"]["last_positions"] == targets.shape[1]
        assert sample["ntokens"] == targets.numel()
        for row_in, row_out in zip(inputs, targets, strict=True):
            for offset, target in enumerate(row_out.tolist()):
                read = row_in[: len(row_in) - len(row_out) + offset + 1]
                assert target not in scored
                assert read[-1] == (EOS if target == 10 else target - 1)
                scored[target] = len(read)
    assert sorted(scored) == list(range(10, 10 + tokens))
    # fairseq: blocks of `new` tokens, each after as many of the tokens before it as fit into `context`.
    for target, length in scored.items():
        position = target - 10
        block = position // new * new
        assert length == position - max(0, block - context) + 1


@pytest.mark.parametrize(("tokens", "expected"), [(16, [[0], [1, 2]]), (15, [[0], [1], [2]]), (5, [[0]])])
def test_windows_of_equal_length_are_read_together(tokens, expected):
    assert SlidingWindows(corpus_of(tokens), new=4, context=4).batches(max_windows=4) == expected


@pytest.mark.parametrize(("new", "context"), [(0, 3), (1, 0)])
def test_impossible_windows_are_refused(new, context):
    with pytest.raises(ValueError, match="context_window"):
        SlidingWindows(corpus_of(8), new, context)


def test_a_collater_without_samples_gives_nothing():
    corpus = corpus_of(8)
    assert SegmentStreams(corpus, 1, 4, PAD).collater([]) == {}
    assert SlidingWindows(corpus, 1, 4).collater([]) == {}


class Recorder:
    """A model that carries one state, of as many rows as it is told, and keeps what it is given."""

    def __init__(self, rows: int) -> None:
        self.states = [{"state": torch.ones(rows, 3)}]
        self.restored: list[object] = []

    def carried_states(self) -> list[dict[str, torch.Tensor]]:
        return self.states

    def restore_carried_states(self, states: list[dict[str, torch.Tensor]]) -> None:
        self.restored.append(states)


def iterate(
    carrier: Recorder | None, *, rows: int = 2, shards: int = 1, shard: int = 0, length: int = 4, tokens: int = 40
) -> SegmentIterator:
    data = SegmentStreams(corpus_of(tokens), rows * shards, length, PAD)
    return SegmentIterator(data, carrier, batch_sampler=data.batches(shards), num_shards=shards, shard_id=shard)


def state_after(batches: int, iterator: SegmentIterator) -> dict[str, object]:
    reading = iterator.next_epoch_itr(shuffle=False)
    for _ in range(batches):
        next(reading)
    return iterator.state_dict()


def test_states_are_kept_in_mid_epoch_alone():
    carrier = Recorder(2)
    assert state_after(2, iterate(carrier))["carried_states"]["states"] is carrier.states
    for batches in (0, 5):  # at an epoch's edges; 20 tokens of each row are 5 batches
        assert "carried_states" not in state_after(batches, iterate(carrier))
    assert "carried_states" not in state_after(2, iterate(None))


@pytest.mark.parametrize("options", [{}, {"shards": 2}], ids=str)
def test_states_are_taken_up_where_they_were_left(options):
    kept = state_after(2, iterate(Recorder(2), **options))
    carrier = Recorder(2)
    iterate(carrier, **options).load_state_dict(kept)
    assert carrier.restored == [kept["carried_states"]["states"]]


@pytest.mark.parametrize(
    "options", [{"rows": 3}, {"shards": 2}, {"rows": 1, "shards": 2}, {"length": 5}, {"tokens": 41}], ids=str
)
def test_states_of_other_places_in_the_text_are_left_out(options, caplog):
    kept = state_after(2, iterate(Recorder(2)))
    carrier = Recorder(2)
    iterate(carrier, **options).load_state_dict(kept)
    assert carrier.restored == []
    assert "are of 40 tokens, 2 streams, 1 processes, 4 tokens per sample, now there are" in caplog.text


def test_states_of_the_first_process_are_not_those_of_others():
    kept = state_after(2, iterate(Recorder(2), shards=2))
    carrier = Recorder(2)
    iterate(carrier, shards=2, shard=1).load_state_dict(kept)
    assert carrier.restored == []


def test_checkpoints_from_before_states_were_kept_load():
    kept = {name: x for name, x in state_after(2, iterate(Recorder(2))).items() if name != "carried_states"}
    carrier = Recorder(2)
    iterate(carrier).load_state_dict(kept)
    assert carrier.restored == []
