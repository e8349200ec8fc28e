"""Streams after an interruption: where they are taken up, with which states."""

import itertools
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from fairseq_fastweights.data import segment_iterator
from fairseq_fastweights.data.segment_iterator import SegmentIterator, distribute, join
from fairseq_fastweights.data.segment_streams import SegmentStreams
from fairseq_fastweights.invalid_input import InvalidInput
from tests.data.test_corpus_readers import PAD, corpus_of


def iterate(carrier: Mock | None, rows=2, shards=1, shard=0, length=4, tokens=40) -> SegmentIterator:
    data = SegmentStreams(corpus_of(tokens), rows * shards, length, PAD)
    return SegmentIterator(data, carrier, batch_sampler=data.batches(shards), num_shards=shards, shard_id=shard)


def states_of(rows: int, first: int = 0) -> list[dict[str, Tensor]]:
    """States of one layer; each row's are its number."""
    return [{"state": torch.arange(first, first + rows).float()[:, None]}]


def state_after(batches: int, iterator: SegmentIterator) -> dict[str, object]:
    list(itertools.islice(iterator.next_epoch_itr(shuffle=False), batches))
    return iterator.state_dict()


def test_states_are_kept_in_mid_epoch_alone():
    states = states_of(2)
    carrier = Mock(carried_states=lambda: states)
    assert state_after(2, iterate(carrier))["carried_states"]["states"] is states
    for batches, other in ((0, carrier), (5, carrier), (2, None)):  # 20 tokens of each row are 5 batches
        assert "carried_states" not in state_after(batches, iterate(other))
    # Of two processes the first has those of both, where these were gathered.
    assert "carried_states" not in state_after(2, iterate(carrier, shards=2, rows=1))


def test_without_states_a_run_goes_on_in_batches_of_another_size():
    """Four streams: rows of one process, or one row of each of two processes at a time."""

    def of(rows: int, shards: int, shard: int = 0) -> SegmentIterator:
        data = SegmentStreams(corpus_of(40), 4, 4, PAD, carried=False)
        sampler = data.batches(4 // rows)
        return SegmentIterator(data, None, batch_sampler=sampler, num_shards=shards, shard_id=shard)

    state = state_after(2, of(rows=4, shards=1))
    assert state["segments_read"] == 8
    found = []
    for shard in range(2):
        iterator = of(rows=1, shards=2, shard=shard)
        iterator.load_state_dict(state)
        found += [x for batch in iterator.next_epoch_itr(shuffle=False) for x in batch["target"].flatten().tolist()]
    assert sorted(found) == [10 + 10 * stream + place for stream in range(4) for place in (8, 9)]


def streams(count=4, length=4, rows=1, carrier=None) -> SegmentIterator:
    data = SegmentStreams(corpus_of(40), count, length, PAD, carried=carrier is not None)
    return SegmentIterator(data, carrier, batch_sampler=data.batches(count // rows))


def test_text_streams_are_read_once_whatever_the_batches_after_each_stop():
    state, found = state_after(3, streams(rows=1)), []
    for rows in (2, 4, 1, 2):  # 3 segments are no whole number of batches of these
        iterator = streams(rows=rows)
        iterator.load_state_dict(state)
        batches = itertools.islice(iterator.next_epoch_itr(shuffle=False), None if found[7:] else 1)
        found += [number for batch in batches for number in batch["id"].tolist()]
        if not iterator.end_of_epoch():
            state = iterator.state_dict()
    assert found[:7] == [3, 4, 5, 6, 7, 8, 9] and sorted(found) == list(range(3, 12))


STREAMS = state_after(3, streams())
CARRIED = state_after(2, iterate(Mock(carried_states=lambda: states_of(2))))


@pytest.mark.parametrize(
    ("state", "options", "told"),
    [
        (STREAMS, {"count": 2}, "text_streams is 2, but the checkpoint stopped within an epoch with 4; it must be"),
        (STREAMS, {"length": 5}, "tokens_per_sample is 5, but .* with 4; .*, or --reset-dataloader be given"),
        (STREAMS, {"carrier": Mock()}, "carry_over_state is True, but .* with False"),
        (CARRIED, {}, "carry_over_state is False, but .* with True"),
    ],
)
def test_other_streams_are_refused_within_an_epoch(state, options, told):
    with pytest.raises(InvalidInput, match=told):
        streams(**options).load_state_dict(state)


def read_on(carriers: list[Mock], state: dict[str, object], stop: int | None = None, **layout: int) -> list[list[int]]:
    """The targets of each stream in the streams' order, after the number of the stream that it continues, or -1."""
    shards, rows = len(carriers), []
    for shard, carrier in enumerate(carriers):
        iterator = iterate(carrier, shards=shards, shard=shard, **layout)
        iterator.load_state_dict(state)
        batches = list(itertools.islice(iterator.next_epoch_itr(shuffle=False), stop))
        assert stop is not None or iterator.end_of_epoch()
        for row in range(layout["rows"]):
            targets = [x for batch in batches for x in batch["target"][row].tolist() if x != PAD]
            continues = [bool(batch["net_input"]["continues"][row]) for batch in batches]
            [layer] = carrier.restore_carried_states.call_args.args[0]
            # -1 for empty states.
            rows.append([int(layer["state"][row, 0]) if continues[0] else -1, *targets])
        carrier.state = iterator.state_dict()
    return rows


@pytest.mark.parametrize("read", [1, 2, 4])
@pytest.mark.parametrize("length", [4, 3])
@pytest.mark.parametrize(("processes", "rows"), [(1, 4), (4, 1), (2, 2), (1, 2), (1, 1), (3, 1), (2, 3), (1, 40)])
def test_every_token_that_is_left_is_read_once_by_any_number_of_processes(processes, rows, length, read):
    first = iterate(Mock(carried_states=lambda: states_of(4)), rows=4, length=4, tokens=81)
    state = state_after(read, first)
    carriers = [Mock() for _ in range(processes)]
    found = read_on(carriers, state, rows=rows, length=length, tokens=81)
    left = [range(10 + 81 * i // 4 + read * 4, 10 + 81 * (i + 1) // 4) for i in range(4)]
    assert sorted(x for row in found for x in row[1:]) == [x for part in left for x in part]
    if processes * rows == 4:
        assert found == [[i, *part] for i, part in enumerate(left)]
    for source, *targets in found:
        assert source == -1 or targets[0] == left[source][0]
    assert len({row[0] for row in found} - {-1}) == min(4, processes * rows)


def test_a_run_may_be_interrupted_again_and_again():
    state, seen = state_after(1, iterate(Mock(carried_states=lambda: states_of(4)), rows=4, tokens=81)), []
    for rows in (3, 7, 2, 2):
        carrier = Mock(carried_states=lambda rows=rows: states_of(rows))
        seen += [x for row in read_on([carrier], state, rows=rows, tokens=81, stop=1) for x in row[1:]]
        state = carrier.state
    assert state["iterations_in_epoch"] == 5
    seen += [x for row in read_on([Mock()], state, rows=5, tokens=81) for x in row[1:]]
    assert sorted(seen) == [x for i in range(4) for x in range(14 + 81 * i // 4, 10 + 81 * (i + 1) // 4)]


def test_the_same_segments_start_empty_in_any_processes_and_after_a_stop():
    """Each epoch has others, another seed has others, and an evaluation has none."""

    def read(shards=1, seed=5, stop=None, state=None, evaluates=False):
        """The iterator of each process, and the first tokens of the segments that continue."""
        found, iterators = set(), []
        for shard in range(shards):
            data = SegmentStreams(corpus_of(400), 4, 4, PAD, reset_probability=0.3, seed=seed)
            carrier = Mock(carried_states=lambda: states_of(4))
            named = {"num_shards": shards, "shard_id": shard}
            iterator = SegmentIterator(data, carrier, batch_sampler=data.batches(shards), **named)
            if state is not None:
                iterator.load_state_dict(state)
            epoch = iterator.next_epoch_itr(shuffle=False, set_dataset_epoch=not evaluates)
            for batch in itertools.islice(epoch, stop):
                found.update(batch["target"][batch["net_input"]["continues"], 0].tolist())
            iterators.append(iterator)
        return iterators, found

    (whole,), continued = read()
    assert 40 < len(continued) < 96 and len(read(evaluates=True)[1]) == 4 * 24  # 25 segments of 4 streams
    assert read(shards=2)[1] == read(shards=4)[1] == continued != read(seed=6)[1]
    (parts,), first = read(stop=9)
    for shards in (1, 2):
        assert first | read(shards, state=parts.state_dict())[1] == continued
    again = whole.next_epoch_itr(shuffle=False)
    assert continued != {x for batch in again for x in batch["target"][batch["net_input"]["continues"], 0].tolist()}


def test_streams_that_are_over_are_not_dealt_out():
    assert distribute([[], [(5, 7)], [(8, 9)], []], 2) == ([[(5, 7)], [(8, 9)]], [1, 2])
    assert distribute([[], [(5, 8), (9, 10)]], 4) == ([[], [], [(5, 7)], [(7, 8), (9, 10)]], [None, None, 1, None])


def test_the_first_process_has_the_states_of_all(monkeypatch):
    everyone = [states_of(2), states_of(2, first=2)]
    monkeypatch.setattr(segment_iterator, "dist", SimpleNamespace(new_group=Mock(), destroy_process_group=Mock()))

    def gather_object(own, into, group):
        assert own is everyone[0] if into else own is everyone[1]
        if into:
            into[:] = everyone

    segment_iterator.dist.gather_object = gather_object
    for shard in (1, 0):
        iterator = iterate(Mock(carried_states=lambda shard=shard: everyone[shard]), shards=2, shard=shard)
        list(itertools.islice(iterator.next_epoch_itr(shuffle=False), 1))
        iterator.gather_states()
        state = iterator.state_dict()
        assert ("carried_states" in state) == (shard == 0)
    assert torch.equal(state["carried_states"]["states"][0]["state"], states_of(4)[0]["state"])


def test_a_layer_that_one_process_never_ran_has_empty_states_there():
    [first, second] = join([[{"a": torch.ones(2, 3)}, {}], [{}, {}]])
    assert torch.equal(first["a"], torch.cat([torch.ones(2, 3), torch.zeros(2, 3)])) and second == {}


def test_states_of_another_text_are_left_out(caplog):
    carriers = [Mock(), Mock()]
    states = [state_after(2, iterate(Mock(carried_states=lambda: states_of(2)), tokens=tokens)) for tokens in (40, 41)]
    for carrier, state, first in zip(carriers, states, ([0, 1], [4, 5]), strict=True):
        iterator = iterate(carrier)
        iterator.load_state_dict(state)
        assert next(iterator.next_epoch_itr(shuffle=False))["id"].tolist() == first
        del state["carried_states"]
        iterate(carrier).load_state_dict(state)
    assert [carrier.restore_carried_states.call_count for carrier in carriers] == [1, 0]
    assert "text of 41 tokens, not of 40" in caplog.text
