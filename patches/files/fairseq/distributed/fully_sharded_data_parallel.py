"""Shards parameters, gradients and the optimizer's state between processes, by PyTorch's `fully_shard`.

This takes the place of fairscale, whose last release is of 2022. The trainer calls it where it called fairscale.

Each process keeps a part of every parameter, cut along the first dimension. The model is put together, group after
group, for the forward and the backward pass; the optimizer sees the parts alone, as ordinary tensors. A checkpoint is
put together in the first process: it is the one that a single process writes, and any number of them can read it.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from fairseq import utils
from fairseq.invalid_input import InvalidInput
from torch import Tensor, nn
from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

FSDP, has_FSDP = None, False  # fairscale's: fairseq.checkpoint_utils asks for it where a checkpoint is in several files

_UNIT = "_is_sharded_alone"
_wrapping = False


@contextmanager
def fsdp_enable_wrap(cfg: Any) -> Iterator[None]:
    """While the model is built, `fsdp_wrap` notes which modules are sharded by themselves."""
    global _wrapping
    _wrapping = True
    try:
        yield
    finally:
        _wrapping = False


def fsdp_wrap(module: nn.Module, min_num_params: int | None = None, **unused: Any) -> nn.Module:
    """Notes that `module` is a group by itself, which is put together when its forward pass begins.

    Args:
        module: a layer, or the whole model.
        min_num_params: modules of fewer parameters stay in the group around them (--min-params-to-wrap).
    """
    if _wrapping and sum(p.numel() for p in module.parameters()) >= (min_num_params or 0):
        setattr(module, _UNIT, True)
    return module


def check_options(cfg: Any) -> None:
    """Raises an `InvalidInput` that names an option which parameters in parts cannot serve."""
    half = cfg.common.fp16 and not cfg.common.memory_efficient_fp16
    for option, is_set, why in (
        ("--amp", cfg.common.amp, "--fp16 and --bf16 can be"),
        ("--cpu-offload", cfg.distributed_training.cpu_offload, "parameters stay where they are used"),
        ("--use-sharded-state", cfg.distributed_training.use_sharded_state, "a checkpoint is one file"),
        (
            "--zero-sharding",
            cfg.distributed_training.zero_sharding != "none",
            "its state is in parts anyway",
        ),
        ("--store-ema", cfg.ema.store_ema, "the average would be a whole model in each process"),
        ("--eval-bleu", getattr(cfg.task, "eval_bleu", False), "processes would write texts of different lengths"),
    ):
        if is_set:
            raise InvalidInput(f"{option} is set; with --ddp-backend fully_sharded it must not be: {why}")
    if half and not cfg.common.fp16_no_flatten_grads:
        raise InvalidInput("--fp16 is set; with --ddp-backend fully_sharded --fp16-no-flatten-grads must be set too")


class FullyShardedDataParallel(nn.Module):
    """A model in parts; attributes that are not defined here are the model's own.

    Its parameters are this process's parts, plain tensors that share memory with the model's.

    Args:
        module: the model, on the CPU or on `device`; it is changed in place.
        cfg: fairseq's `DistributedTrainingConfig`.
        process_group: the processes that share the model.
        device: where it is trained.
    """

    use_sharded_state = False

    def __init__(self, module: nn.Module, cfg: Any, process_group: ProcessGroup, device: torch.device) -> None:
        # Here, as it takes most of a second, which every command of fairseq would wait for.
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        super().__init__()
        self._mesh = DeviceMesh.from_group(process_group, device.type)
        self._is_first = self._mesh.get_local_rank() == 0
        dtype = torch.float16 if cfg.fp16 else torch.bfloat16 if cfg.bf16 else None
        policy = MixedPrecisionPolicy(
            param_dtype=dtype,
            reduce_dtype=torch.float32 if cfg.fp32_reduce_scatter else None,
            cast_forward_inputs=False,  # states of layers stay in float32
        )
        if dtype is not None:  # as module.half() would
            for buffer in module.buffers():
                if buffer.is_floating_point():
                    buffer.data = buffer.to(dtype)
        units = [x for x in module.modules() if getattr(x, _UNIT, False) and x is not module]
        # Inner modules first, as fully_shard asks for.
        for unit in reversed(units):
            fully_shard(unit, mesh=self._mesh, reshard_after_forward=not cfg.no_reshard_after_forward, mp_policy=policy)
        # It warns of changes in place to a view that a model returns; no criterion makes any.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
        # The rest stays together until the backward pass is over: the criterion may use it.
        fully_shard(module, mesh=self._mesh, reshard_after_forward=False, mp_policy=policy)
        self.module = module.to(device)
        self._wholes: dict[str, Any] = dict(module.named_parameters(remove_duplicate=False))
        self._parts = {
            name: nn.Parameter(self._wholes[name].detach().to_local(), requires_grad=x.requires_grad)
            for name, x in module.named_parameters()
        }
        # Checkpoints have whole tensors, of which each process takes its rows.
        module.register_load_state_dict_pre_hook(self._split)
        logger.info(
            "fully sharded in %s groups: this process keeps %s of %s parameters",
            len(units) + 1,
            f"{sum(part.numel() for part in self._parts.values()):,}",
            f"{sum(self._wholes[name].numel() for name in self._parts):,}",
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """The model's."""
        return self.module(*arguments, **options)

    def named_parameters(self, *arguments: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """This process's parts, which the optimizer gets."""
        yield from self._parts.items()

    def state_dict(self, *arguments: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        """The model's, whole and on the CPU, in the first process; nothing in the others, which must call it too."""
        state = self.module.state_dict(*arguments, **options)
        # Every process takes part in each all-gather, the first alone keeps the result.
        joined: dict[int, Tensor | None] = {}  # one parameter with two names is one in a checkpoint too
        for name, whole in self._wholes.items():
            if id(whole) not in joined:
                joined[id(whole)] = self._gather(state[name])
            state[name] = joined[id(whole)]
        return state if self._is_first else {}

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        """The model's, of whole tensors."""
        return self.module.load_state_dict(*arguments, **options)

    def all_reduce_grads(self) -> None:
        """Gives the parts their gradients, of all processes; the trainer calls it after the last backward pass."""
        for name, part in self._parts.items():
            whole = self._wholes[name]
            part.data = whole.detach().to_local()  # before its first pass FSDP may move it
            part.grad = None if whole.grad is None else whole.grad.to_local()
            whole.grad = None

    def gather_full_optim_state_dict(self, optimizer: Any) -> dict[str, Any] | None:
        """The state of fairseq's `optimizer` with whole tensors, in the first process; the others get None."""
        known = {id(part): name for name, part in self._parts.items()}
        groups = optimizer.optimizer.param_groups
        names = [known[id(part)] for group in groups for part in group["params"]]
        found = dict(optimizer.state_dict())
        found["state"] = {
            number: {key: self._whole(x, names[number]) for key, x in state.items()}
            for number, state in found["state"].items()
        }
        if "fp32_params" in found:
            found["fp32_params"] = [self._whole(x, name) for x, name in zip(found["fp32_params"], names, strict=True)]
        return found if self._is_first else None

    def get_shard_from_optim_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """This process's part of an optimizer's state with whole tensors."""
        parts: dict[str, Any] = utils.apply_to_sample(lambda x: self._part(x).clone() if x.dim() else x, state_dict)
        return parts

    def _whole(self, x: Any, name: str) -> Any:
        """The `x` of all processes, laid out as the parameter `name`, in the first; numbers are alike in all."""
        if not isinstance(x, Tensor) or not x.dim():
            return x
        return self._gather(self._lay_out(x, self._wholes[name]))

    def _lay_out(self, part: Tensor, whole: Tensor) -> Any:
        """A DTensor, shaped as `whole`, of which this process has `part`."""
        from torch.distributed.tensor import DTensor, Shard

        part = part.to(self._mesh.device_type)
        return DTensor.from_local(
            part, self._mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )

    def _gather(self, x: Any) -> Tensor | None:
        full = x.full_tensor()  # which may be part of a larger one, where the last process has fewer rows
        return full.to("cpu", copy=True) if self._is_first else None

    def _part(self, x: Tensor) -> Tensor:
        """This process's rows of `x`, cut as `fully_shard` cuts parameters; after the last there are none."""
        parts = x.chunk(self._mesh.size())
        rank = self._mesh.get_local_rank()
        return parts[rank] if rank < len(parts) else x[:0]

    def _split(self, module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
        for name in self._wholes.keys() & state.keys():
            state[name] = self._lay_out(self._part(state[name]), state[name])
