"""The operators of an update of fairseq-train and its waits for a GPU, found on a CPU; CUDA graphs on a CPU."""

import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn
from unittest import mock

import torch
import torch._inductor.config
from fairseq import utils
from fairseq.trainer import Trainer
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from fairseq_fastweights.models import cuda_graphs
from fairseq_fastweights.ops import elementwise

PARTS = ("forward", "backward", "reduce-grads", "multiply-grads", "clip-grads", "optimizer")
"""The parts of an update in fairseq's profile; all else is "other": logging, checks, averages."""

# Views, allocations and metadata: they start nothing on a GPU.
FREE = frozenset(
    """alias as_strided broadcast_tensors chunk contiguous detach detach_ empty empty_like empty_strided expand
    expand_as flatten lift_fresh movedim narrow new_empty new_empty_strided numpy_T permute reshape resize_ resize_as_
    resolve_conj resolve_neg result_type select set_ slice split split_with_sizes squeeze swapaxes t to transpose unbind
    unflatten unfold unsqueeze unsafe_split unsafe_split_with_sizes view view_as _conj _has_compatible_shallow_copy_type
    _reshape_alias _unsafe_view""".split()
)
WAITING = frozenset("_local_scalar_dense equal is_nonzero masked_select nonzero unique_consecutive _unique2".split())
MASKED = frozenset("index index_put index_put_ _index_put_impl_".split())
"""These wait only if an index is a mask."""
_COMPILED = "_cpp_fused_"
"""In the names of the kernels that torch.compile makes for a CPU."""


@dataclass
class Update:
    """Counts of an update.

    An operator within another counts with that: a list of tensors is one operator. Every kernel of compiled code
    counts, and a replay of a CUDA graph is one.
    """

    operators: dict[str, Counter[str]] = field(default_factory=dict)  # by part, how often each was started
    waits: list[str] = field(default_factory=list)  # where the CPU would wait for a GPU, with fairseq's lines

    @property
    def total(self) -> int:
        return sum(sum(counter.values()) for counter in self.operators.values())

    @property
    def compiled(self) -> int:
        """The number of compiled kernels among them."""
        return sum(n for counter in self.operators.values() for name, n in counter.items() if _COMPILED in name)


@contextmanager
def watched(after: int = 5) -> Iterator[Update]:
    """Counts, in a training within this process, the operators of one update and the waits of the next one."""
    from fairseq import many_tensors

    update, original, done = Update(), Trainer.train_step, 0

    def train_step(trainer: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal done
        done += 1
        step: Callable[[], Any] = lambda: original(trainer, *arguments, **options)  # noqa: E731
        if done == after + 1:
            with profile(activities=[ProfilerActivity.CPU]) as found:
                result = step()
            update.operators = count(found.events())
            return result
        return find_waits(trainer, step, update.waits) if done == after + 2 else step()

    Trainer.train_step = train_step
    try:
        # As on a GPU: the project's kernels also for small tensors, and an optimizer for lists of tensors.
        kernels = mock.patch.dict(elementwise.FASTER_FROM, dict.fromkeys(elementwise.FASTER_FROM, (0, 0)))
        together = mock.patch.object(many_tensors, "NAG_ON", ("cpu",))
        with torch._inductor.config.patch({"cpp.enable_kernel_profile": True}), kernels, together:
            yield update
    finally:
        Trainer.train_step = original


def count(events: Any) -> dict[str, Counter[str]]:
    """For each part of an update, the operators that no other operator has started."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for event in events:
        above, part = event.cpu_parent, "other"
        while above is not None and not _is_counted(above.name):
            part = above.name if above.name in PARTS else part
            above = above.cpu_parent
        # `above` is None for an operator that no counted one has called.
        if above is None and _is_counted(event.name):
            found[part][event.name.rpartition("::")[2]] += 1
    return dict(found)


def _is_counted(name: str) -> bool:
    if _COMPILED in name:
        return True
    kind, _, operator = name.rpartition("::")
    return bool(kind) and "autograd" not in kind and operator not in FREE


def find_waits(trainer: Any, step: Callable[[], Any], found: list[str]) -> Any:
    """Runs an update on a CPU, as if the model and copies of the batches were on a GPU."""
    from fairseq import host_copies

    gpu = _OnGpu(found)
    for x in (*trainer.model.parameters(), *trainer.model.buffers(), *trainer.optimizer.params):
        gpu.note(x)
    original = trainer._prepare_sample

    # Batches become clones whose originals are known, as fairseq's copies to a GPU are.
    def prepare(sample: Any, *others: Any, **options: Any) -> Any:
        moved = utils.apply_to_sample(lambda x: gpu.note(host_copies.remember(x.clone(), x)), sample)
        return original(moved, *others, **options)

    # These methods are no operators: the mode below does not see them.
    kept = {name: getattr(Tensor, name) for name in ("cpu", "numpy", "tolist")}

    def asking(name: str) -> Callable[..., Any]:
        def ask(x: Tensor, *arguments: Any) -> Any:
            if gpu.has(x):
                gpu.wait(name)
                x = gpu.read(x)
            return kept[name](x, *arguments)

        return ask

    trainer._prepare_sample = prepare
    for name in kept:
        setattr(Tensor, name, asking(name))
    try:
        with gpu:
            return step()
    finally:
        del trainer._prepare_sample
        for name, method in kept.items():
            setattr(Tensor, name, method)


class _OnGpu(TorchDispatchMode):
    """Follows the tensors that a GPU would have, and notes where the CPU would read one."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found
        self._there: dict[int, StorageWeakRef] = {}  # kept alive: no other storage gets its address

    def note(self, x: Tensor) -> Tensor:
        storage = StorageWeakRef(x.untyped_storage())
        self._there[storage.cdata] = storage
        return x

    def has(self, x: Any) -> bool:
        return isinstance(x, Tensor) and x.untyped_storage()._cdata in self._there

    def read(self, x: Tensor) -> Tensor:
        """A copy of x on the CPU."""
        with _disable_current_modes():
            return x.detach().clone()

    def wait(self, operator: str) -> None:
        lines = [
            f"{frame.filename.partition('site-packages/')[2] or frame.filename}:{frame.lineno}"
            for frame in traceback.extract_stack()
            if "fairseq" in frame.filename and "benchmarks" not in frame.filename
        ]
        self._found.append(f"{operator} at {' < '.join(lines[:-4:-1])}")

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        there = any(map(self.has, tree_leaves((arguments, options))))
        name = operator.overloadpacket.__name__
        # A mask as an index: the size of the result depends on values, for which the CPU has to wait.
        masked = name in MASKED and any(
            isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) and self.has(x) for x in arguments[1]
        )
        if there and (name in WAITING or masked):
            self.wait(name)
        results = operator(*arguments, **options)
        if there:
            # Results and arguments that are written in place are on the GPU, too.
            written = [
                value
                for value, argument in zip(arguments, operator._schema.arguments, strict=False)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            for x in tree_leaves((results, written)):
                if isinstance(x, Tensor):
                    self.note(x)
        return results


class StandInGraph(cuda_graphs.CudaGraph):
    """Stands in for a CUDA graph on a CPU: a replay runs the recorded function again, and counts as one operator.

    As with a graph, a recording computes nothing, and a replay overwrites the results of the one before.
    """

    device_type = "cpu"

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def warm_up(work: Callable[[], Any]) -> None:
        work()

    def record(self, work: Callable[[], Any], after: Any = None) -> None:
        self._work, self.results = work, work()
        for x in self.results:
            if x is not None and x.is_floating_point():
                x.data.fill_(float("nan"))

    def __reduce__(self) -> NoReturn:
        raise TypeError("a graph cannot be copied")

    def replay(self) -> None:
        with record_function("cuda_graph::replay"):
            former, self.results = self.results, self._work()
            for old, new in zip(former, self.results, strict=True):
                if old is not None:
                    old.data.copy_(new.data)


@contextmanager
def stand_in_graphs() -> Iterator[None]:
    """Lets a CPU train with --cuda-graphs."""
    refused = {option: row for option, row in cuda_graphs._REFUSED.items() if option != "cpu"}
    with mock.patch.multiple(cuda_graphs, CudaGraph=StandInGraph, _REFUSED=refused):
        yield
