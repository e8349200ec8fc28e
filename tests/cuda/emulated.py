"""The CUDA kernels, run by the emulator in emulation/, as functions of CPU tensors.

Tensors are named as a rule's arguments and the fields in cuda/kernels.h; outputs and workspaces start as NaN.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_char_p, c_double, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.cuda.build import ROOT
from tests.ops.agreement import assert_close
from tests.ops.results import cotangents, definition
from tests.ops.rules import Inputs, RuleCase, mapped, state_dtype

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}
OPERATIONS = ("diagonal_forward", "diagonal_backward", "delta_forward", "delta_backward")
GATES = ("log_gate", "log_key_decay", "log_value_decay", "beta", "erase")  # optional inputs
TOLERANCE = {
    # The promise is 1e-5 up to T = 4096; these lengths need less, and half a unit in the last place.
    "recurrent": {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 2e-3, torch.float64: 1e-13},
    # Of float16 results are rounded to 2^-11, and a step's decay or write strength likewise.
    "chunked": {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3},
}


def structures(header: str) -> dict[str, type[ctypes.Structure]]:
    """The structs that a header declares, by name; those of any integers ("Int") have 32 bits."""
    kinds: dict[str, type] = {"int32_t": c_int32, "int64_t": c_int64, "double": c_double, "Int": c_int32}
    kinds |= dict.fromkeys(re.findall(r"^enum (\w+) : int32_t", header, re.MULTILINE), c_int32)
    for name, body in re.findall(r"^struct (\w+) \{\n(.*?)^\};", header, re.MULTILINE | re.DOTALL):
        body = re.sub(r" = [\w.]+", "", body)
        declared = re.findall(r"^ +(?:const )?(\w+\*?) ([\w, ]+);", body, re.MULTILINE)
        fields = [(x, c_void_p if kind[-1] == "*" else kinds[kind]) for kind, xs in declared for x in xs.split(", ")]
        kinds[name.removesuffix("Of")] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return kinds


KINDS = structures("".join((ROOT / path).read_text() for path in ("native/types.h", "cuda/kernels.h")))
Sizes, StridedSequence, StepState, ChunkedPlan = (KINDS[x] for x in ("Sizes", "Sequence", "StepState", "ChunkedPlan"))


def long(cases: Sequence[tuple], short: Sequence[tuple] = ()) -> list:
    """Each case once, all but those that are `short` as well marked for `make test-emulated`."""
    return [pytest.param(*case, marks=() if case in short else pytest.mark.emulated) for case in dict.fromkeys(cases)]


class EmulationError(RuntimeError):
    """A launch failed; the message is the emulator's."""


class Emulator:
    """The compiled kernels; sizes are those of struct Sizes, `algorithm` is "recurrent" or "chunked"."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.emulation_error.restype = c_char_p
        self.library.emulation_schedule.argtypes = [c_int64]
        self.library.emulation_device.argtypes = [c_int32, c_int32]
        self.library.emulation_watch.argtypes = [c_void_p, c_int64]
        self.library.emulation_counted.restype = c_int64
        self.library.emulation_count_of.argtypes = [c_int64, c_void_p]
        self.workspaces: dict[str, int] = {}  # bytes that the last launch of an operation asked for

    @contextmanager
    def schedule(self, seed: int) -> Iterator[None]:
        """Runs threads in another order: 0 ascending, 1 descending, others at random. Results must not differ."""
        self.library.emulation_schedule(seed)
        try:
            yield
        finally:
            self.library.emulation_schedule(0)

    @contextmanager
    def device(self, capability: int, shared_memory: int) -> Iterator[None]:
        """Poses as a device with this compute capability (10 * major + minor) and shared memory (bytes a block)."""
        self.library.emulation_device(capability, shared_memory)
        try:
            yield
        finally:
            self.library.emulation_device(90, 227 * 1024)

    def supports(self, operation, sizes, dtype, capability=90, separate_decays=0) -> bool:
        """True if the chunked kernels take the sizes."""
        return self.plan(operation, sizes, dtype, False, separate_decays, capability).columns > 0

    def plan(self, operation, sizes, dtype, gated=False, separate_decays=0, capability=90) -> ctypes.Structure:
        """How a chunked launch would divide the work: a ChunkedPlan."""
        self.library.fastweights_chunked_plan.restype = ChunkedPlan
        return self._ask("chunked_plan", operation, sizes, dtype, gated, separate_decays, capability)

    def choose(self, operation, sizes, dtype, capability=90, separate_decays=0, gated=False) -> str:
        """The algorithm that the binding would run."""
        chosen = self._ask("choose", operation, sizes, dtype, gated, separate_decays, capability)
        return ("recurrent", "chunked")[chosen]

    def workspace(self, operation, algorithm, sizes, dtype, gates=()) -> int:
        """The bytes that a launch would ask for; `gates` names those of the optional inputs that there are."""
        params = self._parameters(operation, Sizes(*sizes))
        for name, kind in params._fields_:
            if kind is StridedSequence and (name.removeprefix("d_") in gates or name.removeprefix("d_") not in GATES):
                setattr(params, name, StridedSequence(data=1, dtype=DTYPES[dtype]))  # is it null is all that is read
        return self._bytes_of(f"{operation.split('_')[1]}_{algorithm}", params)

    @staticmethod
    def _parameters(operation: str, sizes: ctypes.Structure) -> ctypes.Structure:
        family, way = operation.split("_")
        return KINDS[f"Rule{way.title()}"](sizes=sizes, is_delta=family == "delta")

    def _bytes_of(self, name: str, params: ctypes.Structure) -> int:
        ask = getattr(self.library, f"fastweights_{name}_workspace")
        ask.restype = c_size_t
        return ask(ctypes.byref(params))

    def _ask(self, name: str, operation: str, sizes: tuple, dtype: torch.dtype, *others: int):
        ask = getattr(self.library, f"fastweights_{name}")
        return ask(OPERATIONS.index(operation), ctypes.byref(Sizes(*sizes)), DTYPES[dtype], *others)

    def forward(self, inputs: Inputs, interval: int, algorithm="recurrent", complement=True) -> dict[str, Tensor]:
        """`out`, `final_state` and the `states` that are kept. `complement` is for a log_gate."""
        batch, time, heads, key_dim = inputs["k"].shape
        kept = -(-time // interval) - 1 if interval else 0
        shape, dtype = (key_dim, inputs["v"].shape[3]), state_dtype(inputs["v"].dtype)
        made = {
            "out": poisoned(inputs["v"]),
            "final_state": torch.full((batch, heads, *shape), torch.nan, dtype=dtype),
            "states": torch.full((batch, heads, kept, *shape), torch.nan, dtype=dtype),
        }
        self._launch("forward", algorithm, inputs, made, interval, complement)
        return made

    def step_(self, inputs: Inputs, state: Tensor, complement: bool = True) -> Tensor:
        """`out` of one token; the state is updated in place."""
        made = {"out": poisoned(inputs["v"]), "state": state}
        self._launch("step", None, inputs, made, 0, complement)
        return made["out"]

    def run(self, inputs: Inputs, *, interval, algorithm="recurrent", weights=None, complement=True) -> Inputs:
        """Outputs and all gradients of a rule, named as `definition` names them.

        `weights` are the gradients of out and final_state; None draws them.
        """
        inputs = mapped(inputs, Tensor.detach)
        outputs = self.forward(inputs, interval, algorithm, complement)
        d_out, d_final = weights_for(inputs) if weights is None else weights
        given = {"d_out": torch.zeros_like(outputs["out"]) if d_out is None else d_out, "d_final_state": d_final}
        fields = {name: f"d{name}" if len(name) == 1 else f"d_{name}" for name, x in inputs.items() if x is not None}
        made = {field: poisoned(inputs[name]) for name, field in fields.items()}
        given["states"] = outputs.pop("states")
        self._launch("backward", algorithm, inputs | given, made, interval, complement)
        return outputs | {f"gradient of {name}": made[field] for name, field in fields.items()}

    def _launch(self, way, algorithm, given: Inputs, made: Inputs, interval, complement) -> None:
        operation = f"{'delta' if 'beta' in given else 'diagonal'}_{way}"
        given, made = ({part_of(name, x): x for name, x in tensors.items()} for tensors in (given, made))
        params = self._parameters(operation, Sizes(*given["k"].shape, given["v"].shape[3], interval))
        params.complement = complement and given.get("log_gate") is not None and "beta" not in given
        # Contiguous states, as the binding hands them over.
        given = {name: x.contiguous() if x is not None and "state" in name else x for name, x in given.items()}
        for name, kind in params._fields_:
            tensor = made.get(name, given.get(name))
            if tensor is None:
                continue
            value: object = tensor.data_ptr() or None
            self._watch(tensor)
            if kind is StridedSequence:
                value = StridedSequence(tensor.data_ptr(), *tensor.stride()[:3], DTYPES[tensor.dtype])
            elif kind is StepState:
                value = StepState(tensor.data_ptr(), *tensor.stride()[:3])
            setattr(params, name, value)
        self._call(operation, way + (f"_{algorithm}" if algorithm else ""), params)

    def _watch(self, tensor: Tensor) -> None:
        """Accesses of the tensor are counted, if any are (tools/kernel_accesses.py)."""
        memory = tensor.untyped_storage()
        self.library.emulation_watch(memory.data_ptr(), memory.nbytes())

    def _call(self, operation: str, name: str, params: ctypes.Structure) -> None:
        workspace, size, start = torch.empty(0), 0, 0
        if name != "step":
            size = self.workspaces[operation] = self._bytes_of(name, params)
            workspace = torch.full((size + 512,), 0xFF, dtype=torch.uint8)  # NaN in every type
            start = -workspace.data_ptr() % 256
            self._watch(workspace)
            params.workspace = workspace.data_ptr() + start if size else None
        code = getattr(self.library, f"fastweights_{name}")(ctypes.byref(params), None)
        if code != 0:
            raise EmulationError(f"{name} returned {code}: {self.library.emulation_error().decode()}")
        beyond = torch.cat([workspace[:start], workspace[start + size :]])
        assert bool((beyond == 0xFF).all()), f"{name} wrote beyond its workspace of {size} bytes"


def part_of(name: str, x: Tensor | None) -> str:
    """The field of a rule's argument: decays of keys may be one number to a step."""
    return name.replace("log_gate", "log_key_decay") if x is not None and x.dim() == 4 else name


def poisoned(x: Tensor) -> Tensor:
    """An output of x's shape and layout as the binding allocates it."""
    return torch.empty_like(x).fill_(torch.nan)


def weights_for(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Gradients of out and final_state."""
    k, v = inputs["k"], inputs["v"]
    state = torch.empty(k.shape[0], *k.shape[2:], v.shape[3], dtype=state_dtype(v.dtype))
    return cotangents((torch.empty(v.shape, dtype=v.dtype), state))


def expected(rule: RuleCase, inputs: Inputs) -> Inputs:
    """The results that `Emulator.run` should give, in float64."""
    return definition(rule, inputs, weights_for(inputs))


def check(emulator: Emulator, rule: RuleCase, algorithm: str, interval: int, **shape: object) -> None:
    """Draws inputs of this shape and holds outputs and gradients against the reference."""
    inputs = rule.inputs(**shape)
    actual = emulator.run(inputs, interval=interval, algorithm=algorithm)
    assert_close(actual, expected(rule, inputs), TOLERANCE[algorithm][inputs["v"].dtype])
