"""A run that goes on within an epoch reads its rest once, however batches are made then."""

import random
from itertools import chain, islice

import numpy as np
import pytest
from fairseq.data import FairseqDataset
from fairseq.tasks import FairseqTask
from omegaconf import OmegaConf

pytestmark = pytest.mark.usefixtures("our_fairseq")


class Numbers(FairseqDataset):
    """Samples that are their numbers; `prefetches` as a data set that fairseq keeps in memory."""

    supports_prefetch = False

    def __init__(self, count: int, longest: int = 5, prefetches: bool = False) -> None:
        self.sizes = np.arange(count) % longest + 1
        self.supports_prefetch = prefetches

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return len(self.sizes)

    def num_tokens(self, index: int) -> int:
        return int(self.sizes[index])

    def ordered_indices(self) -> np.ndarray:
        return np.argsort(self.sizes, kind="stable")

    def prefetch(self, indices: list[int]) -> None:
        pass

    def collater(self, samples: list[int]) -> list[int]:
        return samples


def iterators(data=None, processes=1, seed=1, **options):
    task = FairseqTask(OmegaConf.create({}))
    return [
        task.get_batch_iterator(
            data or Numbers(50), num_shards=processes, shard_id=shard, seed=seed, disable_iterator_cache=True, **options
        )
        for shard in range(processes)
    ]


def read(iterators, stop=None, state=None, **epoch):
    """The batches of all processes in turn, up to `stop` of each."""
    for iterator in iterators if state is not None else ():
        iterator.load_state_dict(state)
    rows = [islice(iterator.next_epoch_itr(**epoch), stop) for iterator in iterators]
    return [batch for turn in zip(*rows, strict=True) for batch in turn]


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("prefetches", [False, True])
@pytest.mark.parametrize("processes", [1, 3])
def test_an_epoch_in_parts_is_the_epoch(processes, prefetches, grouped, skip):
    """Every stop, and the same options then."""

    def made():
        options = {"skip_remainder_batch": skip, "grouped_shuffling": grouped, "data_buffer_size": 2}
        return iterators(Numbers(50, prefetches=prefetches), processes, max_sentences=3, **options)

    how = {"fix_batches_to_gpus": prefetches}
    whole = read(made(), **how)
    each = len(whole) // processes
    assert skip or sorted(chain(*whole)) == list(range(50))
    for stop in range(1, each):
        first, second, third = made(), made(), made()
        found = read(first, stop, **how)
        found += read(second, 1, first[0].state_dict())
        if not second[0].end_of_epoch():
            found += read(third, None, second[0].state_dict())
        assert found == whole
        last = (third if third[0]._cur_epoch_itr else second)[0]
        assert last.end_of_epoch() and last.next_epoch_idx == 2 and last.state_dict()["iterations_in_epoch"] == 0


def read_until(stop, sentences=3):
    [first] = iterators(max_sentences=sentences)
    read([first], stop)
    return first.state_dict()


def draw_options(draw):
    options = {"processes": draw.randint(1, 3), "seed": draw.randint(1, 2), "data_buffer_size": draw.choice((0, 2))}
    options["max_sentences"] = draw.choice((None, 1, 3, 4))
    options["max_tokens"] = draw.choice((7, 20) if options["max_sentences"] is None else (None, 12))
    return options | {"required_batch_size_multiple": draw.choice((1, 2)), "grouped_shuffling": draw.random() < 0.3}


@pytest.mark.parametrize("number", range(10))
def test_an_epoch_in_other_batches_is_read_once(number):
    """After each stop other options, or the same once more; the epoch after it is whole again."""
    draw = random.Random(number)
    state, found, options = None, [], draw_options(draw)
    for _ in range(100):
        parts = iterators(**options)
        batches = read(parts, draw.randint(1, 4), state, shuffle=draw.random() < 0.7)
        found += chain(*batches)
        if parts[0].end_of_epoch():
            break
        state = parts[draw.randrange(len(parts))].state_dict()
        options = draw_options(draw) if draw.random() < 0.7 else options
    assert sorted(found) == list(range(50))
    assert sorted(chain(*read(parts))) == list(range(50)) and parts[0].epoch == 2


@pytest.mark.parametrize("options", [{"max_sentences": 4}, {"max_sentences": 5, "processes": 2}])
def test_an_epoch_that_was_divided_anew_goes_on_in_its_new_batches(options):
    state = read_until(4, 5)
    before, whole = read(iterators(max_sentences=5), 4), read(iterators(**options), None, state)
    assert sorted(chain(*before, *whole)) == list(range(50))
    first, second = iterators(**options), iterators(**options)
    found = read(first, 1, state)
    assert found + read(second, None, first[0].state_dict()) == whole


def test_what_was_read_of_other_samples_says_nothing_of_these(caplog):
    """Refused with the settings that changed, and in the run of another checkpoint's weights told."""
    known = read_until(4)
    carried = known | {"samples": None}  # of streams of text
    for data, state in ((Numbers(49), known), (Numbers(50, longest=6), known), (Numbers(50), carried)):
        [other] = iterators(data, max_sentences=3)
        other.changed = "tokens_per_sample was 16 and is 32"
        with pytest.raises(
            ValueError, match=r"^tokens_per_sample was 16 and is 32: .* within an epoch of other samples"
        ):
            other.load_state_dict(state)
        other.goes_on = False
        assert read([other], 1, state) == read(iterators(data, max_sentences=3), 5)[4:]
    assert caplog.text.count("of other samples: as many batches as were read are left out, unless --reset-dat") == 3


@pytest.mark.parametrize("change", [{"divide": None}, {"_frozen_batches": ([7], [8], [7])}])
def test_other_batches_are_refused_where_what_is_left_is_unknown(change):
    """No task divides samples into batches, or samples repeat."""
    [other] = iterators(max_sentences=4)
    vars(other).update(change)
    with pytest.raises(ValueError, match="stopped within an epoch of other batches; they must be the same, or --reset"):
        other.load_state_dict(read_until(4))


@pytest.mark.parametrize("samples", [{}, {"samples": {}}])
def test_a_checkpoint_without_samples_goes_on_after_as_many_batches(samples):
    """As of fairseq as released, and of an iterator that notes no order."""
    state = read_until(4)
    del state["samples"], state["fix_batches_to_gpus"]
    whole = read(iterators(max_sentences=3))
    assert read(iterators(max_sentences=3), None, state | samples) == whole[4:]


def test_where_nothing_is_left_the_next_epoch_begins():
    [first], [other] = iterators(max_sentences=40), iterators(Numbers(50), max_sentences=4)
    read([first], 1, shuffle=False)
    other._frozen_batches = other.frozen_batches[:10]  # the rest is filtered out
    other.load_state_dict(first.state_dict())
    assert other.epoch == 2 and len(read([other])) == 10


class Heard(Numbers):
    """Samples that depend on the epoch, as masks do."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> int:
        return self.epoch * 100 + index


@pytest.mark.parametrize("workers", [0, 1])
def test_data_workers_hear_of_each_epoch(workers):
    [first] = iterators(Heard(4), num_workers=workers, max_sentences=2)
    for epoch in (1, 2):
        assert {number // 100 for number in chain(*read([first]))} == {epoch}
