"""CUDA graphs on a CPU, for counting and for tests."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn
from unittest import mock

from torch.profiler import record_function

from fairseq_fastweights.models import cuda_graphs


class StandInGraph(cuda_graphs.CudaGraph):
    """In the place of a CUDA graph on a CPU: computes what was recorded again, which counts as one operator.

    As of a graph, a recording computes nothing, and a replay overwrites what the one before returned.
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
