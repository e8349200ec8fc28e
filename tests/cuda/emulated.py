"""The CUDA kernels, compiled for the host and run by the emulator in emulation/, as functions of CPU tensors.

The functions have the signatures and the meaning of the operators in `torch.ops.fairseq_fastweights`, and take the
algorithm as well. Outputs and workspaces are poisoned with NaN before each launch.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from ctypes import c_char_p, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path

import torch
from native_toolchain import Torch
from torch import Tensor

from tests.ops.rules import Inputs, Rule, cotangents, definition, state_dtype

ROOT = Path(__file__).resolve().parents[2]
SHIM = Path(__file__).resolve().parent / "emulation"
FLAGS = "-std=c++17 -fPIC -DFASTWEIGHTS_EMULATION -Wall -Wno-unknown-pragmas -fno-strict-aliasing".split()
# A GPU faults on a float4 at an odd address; the host would read it. The emulator makes an error of the trap.
TRAPS = ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]
OF_THE_GPU, OF_THE_CPU = (f"TORCH_LIBRARY_IMPL(fairseq_fastweights, {key}, m)" for key in ("CUDA", "CPU"))
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}
OPERATIONS = ("diagonal_forward", "diagonal_backward", "delta_forward", "delta_backward")


class EmulationError(RuntimeError):
    """A launch failed; the message is the emulator's."""


class Sequence(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("batch", c_int64), ("time", c_int64), ("head", c_int64), ("dtype", c_int32)]


class Sizes(ctypes.Structure):
    _fields_ = [(name, c_int32) for name in ("batch", "time", "heads", "key_dim", "value_dim", "interval")]


class ChunkedPlan(ctypes.Structure):
    _fields_ = [
        *((name, c_int32) for name in ("chunk", "columns", "blocks", "stages", "threads", "segments")),
        ("shared", c_int64),
    ]


class StepState(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("batch", c_int64), ("head", c_int64), ("row", c_int64)]


def _structure(name: str, *fields: str) -> type[ctypes.Structure]:
    """A parameter struct of cuda/kernels.h; a field is a Sequence unless it says `*name` or `name:type`."""
    types = {"sizes": Sizes, "int": c_int32, "state": StepState}
    parsed: list[tuple[str, type]] = []
    for field in fields:
        plain, _, kind = field.lstrip("*").partition(":")
        parsed.append((plain, c_void_p if field.startswith("*") else types[kind] if kind else Sequence))
    return type(name, (ctypes.Structure,), {"_fields_": parsed})


_DIAGONAL = ("q", "k", "v", "log_gate", "log_key_decay", "log_value_decay")
_DELTA = ("q", "k", "v", "beta")
PARAMETERS = {
    "diagonal_forward": _structure(
        "DiagonalForward", "sizes:sizes", "complement:int", *_DIAGONAL, "*initial_state", "out", "*final_state",
        "*states", "*workspace",
    ),
    "diagonal_backward": _structure(
        "DiagonalBackward", "sizes:sizes", "complement:int", "d_out", "*d_final_state", *_DIAGONAL, "*initial_state",
        "*states", *(f"d{'' if len(n) == 1 else '_'}{n}" for n in _DIAGONAL), "*d_initial_state", "*workspace",
    ),
    "delta_forward": _structure(
        "DeltaForward", "sizes:sizes", *_DELTA, "*initial_state", "out", "*final_state", "*states", "*workspace"
    ),
    "delta_backward": _structure(
        "DeltaBackward", "sizes:sizes", "d_out", "*d_final_state", *_DELTA, "*initial_state", "*states",
        "dq", "dk", "dv", "d_beta", "*d_initial_state", "*workspace",
    ),
    "diagonal_step": _structure("DiagonalStep", "sizes:sizes", "complement:int", *_DIAGONAL, "state:state", "out"),
    "delta_step": _structure("DeltaStep", "sizes:sizes", *_DELTA, "state:state", "out"),
}  # fmt: skip


def compiler() -> str | None:
    """The C++ compiler to use: $CXX, g++ or clang++, whichever there is."""
    names = (os.environ.get("CXX"), "g++", "clang++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def build(
    sources: tuple[Path, ...] | None = None,
    extra_flags: tuple[str, ...] = (),
    binding: bool = False,
    optimized: bool = True,
) -> Path:
    """Compiles `sources` (None: cuda/*.cu) and the emulator, each file once for its content, to a shared library.

    `extra_flags` such as ``-fsanitize=address,undefined`` take the place of the trap for misaligned accesses. With
    `binding` the library has cuda/binding.cpp as well: torch loads it, and runs the operators that this registers, but
    for CPU tensors.

    Raises:
        RuntimeError: with the compiler's output, if a file does not compile.
    """
    cxx = compiler()
    if cxx is None:
        raise RuntimeError("no C++ compiler: set CXX, or put g++ or clang++ on PATH")
    headers = sorted([*ROOT.glob("cuda/*.h"), *ROOT.glob("cuda/*.cuh"), *SHIM.rglob("*.h")])
    flags = [*FLAGS, "-O1" if optimized else "-O0", *extra_flags]
    if not extra_flags and "clang" not in cxx:
        flags += TRAPS
    common = hashlib.sha256(" ".join([cxx, platform.machine(), *flags]).encode())
    for header in headers:
        common.update(header.read_bytes())
    folder = Path(tempfile.gettempdir()) / f"fastweights-emulation-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    includes = ["-I", str(SHIM), "-I", str(ROOT / "cuda")]
    link = [cxx, *flags, "-shared"]
    with (folder / "lock").open("w") as lock:  # test processes run side by side
        fcntl.flock(lock, fcntl.LOCK_EX)
        compilations, libraries = [], []
        for source in sorted([*(ROOT.glob("cuda/*.cu") if sources is None else sources), SHIM / "emulation.cpp"]):
            digest = common.copy()
            digest.update(source.read_bytes())
            made = folder / f"{source.stem}-{digest.hexdigest()[:20]}.o"
            compilations.append(([cxx, *flags, *includes], source, made))
        if binding:
            torch_build = Torch.find()
            text = (ROOT / "cuda" / "binding.cpp").read_text()
            assert text.count(OF_THE_GPU) == 1
            text = text.replace(OF_THE_GPU, OF_THE_CPU)
            options = [*flags, *torch_build.compile_flags]
            digest = common.copy()
            digest.update(f"{text}{torch_build.version}{options}".encode())
            source = folder / f"binding-{digest.hexdigest()[:20]}.cpp"
            source.write_text(text)
            compilations.append(
                ([cxx, *options, *includes, *torch_build.include_flags], source, source.with_suffix(".o"))
            )
            libraries = [f"-L{torch_build.library_folder}", "-lc10", "-ltorch_cpu", "-ltorch"]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_compile, *zip(*compilations, strict=True)))
        objects = [made for _, _, made in compilations]
        name = hashlib.sha256(" ".join([*map(str, objects), *link]).encode()).hexdigest()[:20]
        library = folder / f"kernels-{name}.so"
        if not library.exists():
            _run([*link, *map(str, objects), *libraries, "-o", f"{library}.part"])
            os.replace(f"{library}.part", library)
        return library


def _compile(command: list[str], source: Path, made: Path) -> None:
    if not made.exists():
        _run([*command, "-x", "c++", "-c", str(source), "-o", f"{made}.part"])
        os.replace(f"{made}.part", made)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")


class Emulator:
    """The compiled kernels. `algorithm` is "recurrent" or "chunked" throughout."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.emulation_error.restype = c_char_p
        self.library.emulation_schedule.argtypes = [c_int64]
        self.library.emulation_device.argtypes = [c_int32, c_int32]
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

    def supports(
        self,
        operation: str,
        sizes: tuple[int, ...],
        dtype: torch.dtype,
        capability: int = 90,
        separate_decays: bool = False,
    ) -> bool:
        """Whether the chunked kernels take (batch, time, heads, key_dim, value_dim, interval)."""
        return bool(self._ask("fastweights_chunked_supports", operation, sizes, dtype, separate_decays, capability))

    def plan(
        self,
        operation: str,
        sizes: tuple[int, ...],
        dtype: torch.dtype,
        gated: bool = False,
        separate_decays: bool = False,
        capability: int = 90,
    ) -> ChunkedPlan:
        """How a chunked launch would divide the work."""
        ask = self.library.fastweights_chunked_plan
        ask.restype = ChunkedPlan
        pointer = ctypes.byref(Sizes(*sizes))
        return ask(OPERATIONS.index(operation), pointer, DTYPES[dtype], gated, separate_decays, capability)

    def choose(
        self,
        operation: str,
        sizes: tuple[int, ...],
        dtype: torch.dtype,
        capability: int = 90,
        separate_decays: bool = False,
    ) -> str:
        """The algorithm that the binding would run."""
        chosen = self._ask("fastweights_choose", operation, sizes, dtype, separate_decays, capability)
        return ("recurrent", "chunked")[chosen]

    def workspace(
        self,
        operation: str,
        algorithm: str,
        sizes: tuple[int, ...],
        dtype: torch.dtype,
        gates: tuple[str, ...] = (),
    ) -> int:
        """The bytes that a launch would ask for; `gates` names those of the optional inputs that there are."""
        params = PARAMETERS[operation](sizes=Sizes(*sizes))
        for name, kind in params._fields_:
            optional = name.endswith(("log_gate", "_decay"))
            if kind is Sequence and (not optional or name.removeprefix("d_") in gates):
                setattr(params, name, Sequence(data=1, dtype=DTYPES[dtype]))  # whether it is null is all that is read
        return self._bytes_of(f"fastweights_{operation}_{algorithm}", params)

    def _bytes_of(self, name: str, params: ctypes.Structure) -> int:
        ask = getattr(self.library, f"{name}_workspace")
        ask.restype = c_size_t
        return ask(ctypes.byref(params))

    def _ask(self, name: str, operation: str, sizes: tuple[int, ...], dtype: torch.dtype, *others: int) -> int:
        pointer = ctypes.byref(Sizes(*sizes))
        return getattr(self.library, name)(OPERATIONS.index(operation), pointer, DTYPES[dtype], *others)

    def diagonal_forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_gate: Tensor | None,
        complement: bool,
        log_key_decay: Tensor | None,
        log_value_decay: Tensor | None,
        initial_state: Tensor | None,
        interval: int,
        algorithm: str = "recurrent",
    ) -> tuple[Tensor, Tensor, Tensor]:
        gates = {"log_gate": log_gate, "log_key_decay": log_key_decay, "log_value_decay": log_value_decay}
        made = self._forward_outputs(k, v, interval)
        inputs = {"q": q, "k": k, "v": v, **gates, "initial_state": initial_state}
        self._launch("diagonal_forward", algorithm, k, v, interval, inputs | made, complement=complement)
        return made["out"], made["final_state"], made["states"]

    def diagonal_backward(
        self,
        d_out: Tensor,
        d_final_state: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_gate: Tensor | None,
        complement: bool,
        log_key_decay: Tensor | None,
        log_value_decay: Tensor | None,
        initial_state: Tensor | None,
        states: Tensor,
        interval: int,
        algorithm: str = "recurrent",
    ) -> tuple[Tensor | None, ...]:
        gates = {"log_gate": log_gate, "log_key_decay": log_key_decay, "log_value_decay": log_value_decay}
        made = {"dq": _like(q), "dk": _like(k), "dv": _like(v)}
        made |= {f"d_{name}": _like(gate) for name, gate in gates.items()}
        made["d_initial_state"] = _like(initial_state)
        inputs = {"q": q, "k": k, "v": v, **gates, "initial_state": initial_state, "states": states}
        inputs |= {"d_out": d_out, "d_final_state": d_final_state}
        self._launch("diagonal_backward", algorithm, k, v, interval, inputs | made, complement=complement)
        return tuple(made.values())

    def delta_forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        initial_state: Tensor | None,
        interval: int,
        algorithm: str = "recurrent",
    ) -> tuple[Tensor, Tensor, Tensor]:
        made = self._forward_outputs(k, v, interval)
        inputs = {"q": q, "k": k, "v": v, "beta": beta, "initial_state": initial_state}
        self._launch("delta_forward", algorithm, k, v, interval, inputs | made)
        return made["out"], made["final_state"], made["states"]

    def delta_backward(
        self,
        d_out: Tensor,
        d_final_state: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        initial_state: Tensor | None,
        states: Tensor,
        interval: int,
        algorithm: str = "recurrent",
    ) -> tuple[Tensor | None, ...]:
        made = {"dq": _like(q), "dk": _like(k), "dv": _like(v), "d_beta": _like(beta)}
        made["d_initial_state"] = _like(initial_state)
        inputs = {"q": q, "k": k, "v": v, "beta": beta, "initial_state": initial_state, "states": states}
        inputs |= {"d_out": d_out, "d_final_state": d_final_state}
        self._launch("delta_backward", algorithm, k, v, interval, inputs | made)
        return tuple(made.values())

    def diagonal_step_(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_gate: Tensor | None,
        complement: bool,
        log_key_decay: Tensor | None,
        log_value_decay: Tensor | None,
        state: Tensor,
    ) -> Tensor:
        out = _like(v)
        gates = {"log_gate": log_gate, "log_key_decay": log_key_decay, "log_value_decay": log_value_decay}
        tensors = {"q": q, "k": k, "v": v, **gates, "state": state, "out": out}
        self._launch("diagonal_step", None, k, v, 0, tensors, complement=complement)
        return out

    def delta_step_(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor) -> Tensor:
        out = _like(v)
        tensors = {"q": q, "k": k, "v": v, "beta": beta, "state": state, "out": out}
        self._launch("delta_step", None, k, v, 0, tensors)
        return out

    def run(
        self,
        rule: Rule,
        inputs: Inputs,
        *,
        interval: int,
        algorithm: str = "recurrent",
        weights: tuple[Tensor | None, Tensor | None] | None = None,
        complement: bool | None = None,
    ) -> dict[str, Tensor | None]:
        """Outputs and all gradients of a row of the table of rules, named as `rules.definition` names them.

        `weights` are the gradients of out and final_state; None draws them. `complement` overrides the gated rule's.
        """
        given = {name: None if x is None else x.detach() for name, x in inputs.items()}
        q, k, v, state = (given[name] for name in ("q", "k", "v", "initial_state"))
        if rule.operation == "delta_rule":
            family, middle, names = "delta", [given["beta"]], ["beta"]
        else:
            family, names = "diagonal", ["log_gate", "log_key_decay", "log_value_decay"]
            gates = [given.get(name) for name in names]
            middle = [gates[0], gates[0] is not None if complement is None else complement, *gates[1:]]
        arguments = (q, k, v, *middle, state)
        out, final_state, states = getattr(self, f"{family}_forward")(*arguments, interval, algorithm)
        d_out, d_final = weights if weights is not None else cotangents((out, final_state))
        d_out = torch.zeros_like(out) if d_out is None else d_out
        grads = getattr(self, f"{family}_backward")(d_out, d_final, *arguments, states, interval, algorithm)
        named = dict(zip(["q", "k", "v", *names, "initial_state"], grads, strict=True))
        result: dict[str, Tensor | None] = {"out": out, "final_state": final_state}
        return result | {f"gradient of {name}": named[name] for name, x in given.items() if x is not None}

    def _forward_outputs(self, k: Tensor, v: Tensor, interval: int) -> dict[str, Tensor]:
        batch, time, heads, key_dim = k.shape
        kept = -(-time // interval) - 1 if interval else 0
        dtype = state_dtype(v.dtype)
        shape = (key_dim, v.shape[3])
        return {
            "out": _like(v),
            "final_state": torch.full((batch, heads, *shape), torch.nan, dtype=dtype),
            "states": torch.full((batch, heads, kept, *shape), torch.nan, dtype=dtype),
        }

    def _launch(
        self,
        operation: str,
        algorithm: str | None,
        k: Tensor,
        v: Tensor,
        interval: int,
        tensors: dict[str, Tensor | None],
        complement: bool = False,
    ) -> None:
        params = PARAMETERS[operation]()
        params.sizes = Sizes(*k.shape, v.shape[3], interval)
        if hasattr(params, "complement"):
            params.complement = complement
        kept_alive = []
        for name, kind in params._fields_:
            tensor = tensors.get(name)
            if tensor is None:
                continue
            if kind is Sequence:
                batch, time, head = tensor.stride()[:3]
                setattr(params, name, Sequence(tensor.data_ptr(), batch, time, head, DTYPES[tensor.dtype]))
            elif kind is StepState:
                setattr(params, name, StepState(tensor.data_ptr(), *tensor.stride()[:3]))
            else:
                tensor = tensor if name in ("final_state", "states", "d_initial_state") else tensor.contiguous()
                assert tensor.is_contiguous()
                kept_alive.append(tensor)
                setattr(params, name, tensor.data_ptr() or None)
        name = f"fastweights_{operation}" + (f"_{algorithm}" if algorithm else "")
        workspace = torch.empty(0, dtype=torch.uint8)
        if algorithm:
            size = self.workspaces[operation] = self._bytes_of(name, params)
            workspace = torch.full((size + 512,), 0xFF, dtype=torch.uint8)  # NaN in every type
            start = -workspace.data_ptr() % 256
            params.workspace = workspace.data_ptr() + start if size else None
        code = getattr(self.library, name)(ctypes.byref(params), None)
        if code != 0:
            raise EmulationError(f"{name} returned {code}: {self.library.emulation_error().decode()}")
        if algorithm:
            beyond = torch.cat([workspace[:start], workspace[start + size :]])
            assert bool((beyond == 0xFF).all()), f"{name} wrote beyond its workspace of {size} bytes"


def _like(x: Tensor | None) -> Tensor | None:
    """An output of x's shape and layout as the binding allocates it, poisoned."""
    return None if x is None else torch.empty_like(x).fill_(torch.nan)


def compare(
    emulator: Emulator,
    rule: Rule,
    check: Callable[[dict[str, Tensor | None], dict[str, Tensor | None]], None],
    *,
    interval: int,
    algorithm: str = "recurrent",
    **shape: object,
) -> None:
    """Runs a rule on drawn inputs and hands what came out and the float64 definition to `check`."""
    inputs = rule.inputs(**shape)  # type: ignore[arg-type]
    dtype = inputs["v"].dtype  # type: ignore[union-attr]
    out_like = torch.empty(inputs["v"].shape, dtype=dtype)  # type: ignore[union-attr]
    k, v = inputs["k"], inputs["v"]
    assert k is not None and v is not None
    state_like = torch.empty(k.shape[0], k.shape[2], k.shape[3], v.shape[3], dtype=state_dtype(dtype))
    weights = cotangents((out_like, state_like))
    actual = emulator.run(rule, inputs, interval=interval, algorithm=algorithm, weights=weights)
    check(actual, definition(rule, inputs, weights))
