"""CUDA graphs: a GPU records its work once and replays it as one operator, where no shape has changed.

A graph knows memory by its addresses. Inputs are therefore copied to where they were when the graph was recorded, and
results are copied from there: a later call never overwrites a tensor that a caller holds.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.mixers.feature_maps import is_favor
from fairseq_fastweights.ops.kernels import differentiable_once

logger = logging.getLogger(__name__)

REPEATED = 3
"""After so many calls of one form since the last replay the next one is recorded.

Until then all is computed as without graphs. Work that is done only once, such as compiling, choosing algorithms and
allocating workspaces, is done by then.
"""


class CudaGraph:
    """Work of a GPU that was recorded, and its results, which every replay writes anew."""

    device_type = "cuda"
    results: Sequence[Tensor | None]

    @staticmethod
    def is_available() -> bool:
        return torch.cuda.is_available()

    @staticmethod
    def warm_up(work: Callable[[], Any]) -> None:
        """Does the work as a recording will, on a stream beside that of the rest."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)

    def record(self, work: Callable[[], Sequence[Tensor | None]], after: CudaGraph | None = None) -> None:
        """Records work, whose memory is that of the graph which is always replayed before, if there is one."""
        self._graph = torch.cuda.CUDAGraph()
        pool = None if after is None else after._graph.pool()
        # By threads, as that which watches over NCCL asks the GPU meanwhile.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self.results = work()

    def replay(self) -> None:
        self._graph.replay()


class _Recording:
    """The forward and the backward pass of a function, for inputs of one form.

    Gradients are those of the first input, if it has one, and of the parameters.
    """

    def __init__(self, work: Callable[..., list[Any]], inputs: list[Tensor], parameters: list[nn.Parameter]) -> None:
        # The tensors that the graph reads: inputs are copied into them before each replay.
        first, *others = (x.detach().clone() for x in inputs)
        self._inputs = [first.requires_grad_(inputs[0].requires_grad), *others]
        leaves = [x for x in (first, *parameters) if x.requires_grad]
        without = [None] * (not first.requires_grad)
        self._awaited: Any = None  # a weak reference to the last forward pass
        self._forward, self._backward = CudaGraph(), CudaGraph()

        def forward() -> list[Tensor | None]:
            with torch.enable_grad():
                out, *states = work(*self._inputs)
            return [out, *(None if state is None else state.detach() for state in states)]

        def backward(out: Tensor | None) -> Sequence[Tensor | None]:
            assert out is not None
            return [*without, *torch.autograd.grad(out, leaves, self._gradient, allow_unused=True)]

        def both() -> None:
            out = forward()[0]
            assert out is not None
            self._gradient = torch.zeros_like(out)
            backward(out)

        # Dropout is that of a training without graphs: no random number is used up.
        with torch.random.fork_rng(devices=[first.device] if first.is_cuda else []):
            CudaGraph.warm_up(both)
            self._forward.record(forward)
            self._backward.record(lambda: backward(self._forward.results[0]), after=self._forward)

    @property
    def is_awaited(self) -> bool:
        """True if the last forward pass may have its backward pass yet, for which it must not be overwritten."""
        return self._awaited is not None and self._awaited() is not None

    def run_forward(self, context: Any, inputs: list[Tensor]) -> list[Tensor | None]:
        # A weak reference: a forward pass whose graph is dropped needs no backward pass.
        self._awaited = weakref.ref(context)
        torch._foreach_copy_(self._inputs, inputs)
        self._forward.replay()
        return _copies(self._forward.results)

    def run_backward(self, context: Any, gradient: Tensor) -> list[Tensor | None]:
        if self._awaited is None or self._awaited() is not context:
            raise RuntimeError(
                "a second backward pass goes through layers that were replayed as CUDA graphs; each forward pass has "
                "one, and more with no_cuda_graphs and without cuda_graphs"
            )
        self._awaited = None
        self._gradient.copy_(gradient)
        self._backward.replay()
        return _copies(self._backward.results)


class _Replay(torch.autograd.Function):
    """A call of a recorded function as an operator of autograd, of the first input and of the parameters."""

    @staticmethod
    def forward(context: Any, recording: _Recording, others: list[Tensor], x: Tensor, *parameters: Tensor) -> Any:
        out, *states = recording.run_forward(context, [x, *others])
        context.recording = recording
        context.save_for_backward(*parameters)
        context.mark_non_differentiable(*(x for x in states if x is not None))
        return (out, *states)

    @staticmethod
    @differentiable_once
    def backward(context: Any, saved: Any, gradient: Tensor, *unused: Any) -> Any:
        return (None, None, *context.recording.run_backward(context, gradient))


class GraphedFunction:
    """A function whose calls are replayed once they are alike: in shapes, types and the places of the parameters.

    Others, such as a shorter batch at the end of an epoch, are computed as they would be without graphs, and so is a
    call before the backward pass of the one that was replayed last.

    Args:
        function: returns a tensor that has gradients, and nested containers of tensors that have none. Its first
            argument is a tensor that may have some, its others are nested containers of tensors and None.
        module: holds the parameters that the function reads. While its modules have hooks, nothing is replayed.
        options: those of the model. With cuda_graphs it is an error if nothing can be recorded; with compile alone it
            is logged, once.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, Any]], module: nn.Module, options: Any) -> None:
        self._function, self._module, self._options = function, module, options
        self._recording: _Recording | None = None
        self._recorded: Any = None
        self._seen: Counter[Any] = Counter()  # since the last replay
        self._is_possible: bool | None = None  # not known yet

    def is_possible(self, x: Tensor) -> bool:
        """True if calls can be recorded, of which the first that is to be made has x as its first argument.

        Raises:
            ValueError: if not, and cuda_graphs asks for it.
        """
        if self._is_possible is None:
            found = _obstacle(self._options) or _obstacle_of_place(x, self._module)
            if found is not None and self._options.cuda_graphs:
                raise _refusal(*found)
            self._is_possible = found is None
            if found is not None:
                log_compiled_alone(": ".join(found))
        return self._is_possible

    def __call__(self, *arguments: Any) -> tuple[Tensor, Any]:
        """The outputs of the function for these arguments.

        Raises:
            RuntimeError: in a second backward pass; if nothing can be recorded, as memory does not suffice, and
                cuda_graphs asks for it.
        """
        if self._recording is not None and self._recording.is_awaited:
            return self._function(*arguments)
        parameters = [p for p in self._module.parameters() if p.requires_grad]
        if not (torch.is_grad_enabled() and parameters) or any(map(_is_watched, self._module.modules())):
            return self._function(*arguments)
        # A recording serves calls with the same tree of arguments, shapes and places of parameters.
        leaves, structure = tree_flatten(arguments)
        inputs = [x for x in leaves if isinstance(x, Tensor)]
        form = (
            structure,
            tuple((x.shape, x.dtype, x.device, x.requires_grad) if isinstance(x, Tensor) else None for x in leaves),
            tuple(p.data_ptr() for p in parameters),
        )
        if form != self._recorded:
            self._seen[form] += 1
            if self._seen[form] <= REPEATED or not self._record(form, inputs, parameters):
                return self._function(*arguments)
        self._seen.clear()
        assert self._recording is not None
        found = _Replay.apply(self._recording, inputs[1:], inputs[0], *parameters)  # type: ignore[no-untyped-call]
        out, states = tree_unflatten(found, self._results)
        return out, states

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, as of a moving average of the model, has recorded nothing."""
        return GraphedFunction, (self._function, self._module, self._options)

    def _record(self, form: Any, inputs: list[Tensor], parameters: list[nn.Parameter]) -> bool:
        """Records calls of a form; returns whether that is done."""
        structure, shapes, _ = form

        def work(*tensors: Tensor) -> list[Any]:
            rest = iter(tensors)
            arguments = tree_unflatten([None if shape is None else next(rest) for shape in shapes], structure)
            found, self._results = tree_flatten(self._function(*arguments))
            return found

        self._recording = self._recorded = None  # its memory is free for the next
        try:
            self._recording = _Recording(work, inputs, parameters)
        except RuntimeError as error:  # of torch and of the GPU, whose memory may not suffice
            if self._options.cuda_graphs:
                raise
            self._is_possible = False
            # As a recording ends, the GPU says again that it failed; the reason came before.
            log_compiled_alone(str(error.__context__ or error).partition("\n")[0])
            return False
        self._recorded = form
        logger.info("CUDA graphs were recorded for inputs of shape %s", tuple(inputs[0].shape))
        return True


def are_wanted(options: Any) -> bool:
    """True if graphs are to be recorded where that is possible: with cuda_graphs, and with compile by itself."""
    return bool(options.cuda_graphs or (options.compile and not options.no_cuda_graphs))


def log_compiled_alone(reason: str) -> None:
    """Logs that layers are compiled without being recorded, and why."""
    logger.info("compile: the layers are compiled, and not replayed as CUDA graphs: %s", reason)


def check_options(options: Any) -> None:
    """Checks the options that are set together with cuda_graphs, before anything is done.

    Raises:
        ValueError: names an option that cannot be recorded, and says why.
    """
    if getattr(options, "cuda_graphs", False) and (found := _obstacle(options)):
        raise _refusal(*found)


def check_gpu(options: Any) -> None:
    """Raises a `ValueError` if a command for training asks for cuda_graphs where there is no GPU."""
    if getattr(options, "cuda_graphs", False) and not CudaGraph.is_available():
        raise InvalidInput("cuda_graphs is set; it needs a GPU, and torch sees none")


_REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "no_cuda_graphs": (bool, "it asks for none"),
    "cpu": (bool, "a GPU replays them"),
    "amp": (bool, "it keeps copies of weights in 16 bits from call to call; bf16 and fp16 can be"),
    "ddp_backend": (
        lambda value: getattr(value, "value", value) == "fully_sharded",
        "parameters must stay where they are, and those of fully_sharded come and go",
    ),
    "checkpoint_activations": (bool, "what was recorded is not computed again"),
    "offload_activations": (bool, "what was recorded stays on the GPU"),
    "decoder_layerdrop": (bool, "it leaves out other layers each time"),
    "quant_noise_pq": (bool, "it moves weights"),
    "quant_noise_scalar": (bool, "it moves weights"),
    "base_layers": (bool, "what they send where depends on the text"),
    "feature_map": (lambda value: is_favor(str(value)), "it draws its features by a decomposition, which may wait"),
}


def _obstacle(options: Any) -> tuple[str, str] | None:
    """An option that cannot be recorded, with its value, and why; None if there is none."""
    for option, (is_refused, why) in _REFUSED.items():
        value = getattr(options, option, None)
        if value is not None and is_refused(value):
            return f"{option} is {'set' if value is True else getattr(value, 'value', value)}", why
    return None


def _obstacle_of_place(x: Tensor, module: nn.Module) -> tuple[str, str] | None:
    """The same, of a model in training: fairseq-hydra-train shows a model its own options alone."""
    kind = CudaGraph.device_type
    if x.device.type != kind:
        return f"the model is on {x.device}", "a GPU replays them"
    if torch.is_autocast_enabled(kind):
        return "amp is set", _REFUSED["amp"][1]
    if any(type(part).__name__.startswith("FSDP") for part in module.modules()):  # to import its class takes long
        return "ddp_backend is fully_sharded", _REFUSED["ddp_backend"][1]
    return None


def _refusal(given: str, why: str) -> InvalidInput:
    return InvalidInput(f"cuda_graphs is set, and {given}; one of them must go: {why}")


def _is_watched(module: nn.Module) -> bool:
    """True if hooks are to be called, as by fairseq's search for NaN, which replays would not call."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def _copies(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """New tensors with the same numbers, by one operator."""
    known = [x for x in tensors if x is not None]
    made = [torch.empty_like(x) for x in known]
    if known:
        torch._foreach_copy_(made, known)
    rest = iter(made)
    return [None if x is None else next(rest) for x in tensors]
