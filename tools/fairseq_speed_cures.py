"""What starts an operator for every parameter, and what does it for all of them together.

Each row of a cure: a file, what stands there, and what takes its place (`fairseq_cures.Edit`).
"""

_ADAM = "fairseq/optim/adam.py"
_HALF = "fairseq/optim/fp16_optimizer.py"
_OPTIMIZER = "fairseq/optim/fairseq_optimizer.py"
_UTILS = "fairseq/utils.py"
_EMA = "fairseq/models/ema/ema.py"

SPEED_CURES: dict[str, list[tuple[str, str, str]]] = {
    # Adam went parameter by parameter, in seven operators each, where PyTorch has one for all.
    "adam_for_all_parameters": [
        (
            _ADAM,
            "from fairseq.dataclass import Fairseq",
            "from fairseq import many_tensors\nfrom fairseq.dataclass import Fairseq",
        ),
        (
            _ADAM,
            """        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad.data
""",
            """        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if self.goes_together and not group.get("amsgrad", False):
                params = many_tensors.adam(params, self.state, group, self.skip)
            for p in params:
                grad = p.grad.data
""",
        ),
        (
            _ADAM,
            "    def __init__(\n        self,\n        params,\n        lr=1e-3,\n",
            "    goes_together = True  # all parameters in a few operators\n"
            "    skip = None  # a tensor that holds 1. where a step shall change nothing\n\n"
            "    def __init__(\n        self,\n        params,\n        lr=1e-3,\n",
        ),
        (
            _ADAM,
            """                    "--fp16-adam-stats is only supported with FusedAdamV1"
                )
            self._optimizer = Adam(params, **self.optimizer_config)
""",
            """                    "--fp16-adam-stats is only supported with FusedAdamV1"
                )
            self._optimizer = Adam(params, **self.optimizer_config)
            self._optimizer.goes_together = not getattr(cfg, "use_old_adam", False)
""",
        ),
        (
            _ADAM,
            '"help": "Use fairseq.optim.adam.Adam"',
            '"help": "go parameter by parameter, as fairseq 0.12.2 does"',
        ),
    ],
    # So did the norm of the gradients, their multiplication, and the copies between 16 and 32 bits.
    "gradients_together": [
        (
            _UTILS,
            "import torch.nn.functional as F\n",
            "import torch.nn.functional as F\nfrom fairseq import many_tensors\n",
        ),
        (
            _UTILS,
            """                warnings.warn(
                    "amp_C fused kernels unavailable, disabling multi_tensor_l2norm; "
                    "you may get better performance by installing NVIDIA's apex library"
                )
                device = torch.cuda""",
            "                device = torch.cuda",
        ),
        (
            _UTILS,
            """            total_norm = torch.norm(
                torch.stack(
                    [torch.norm(g, p=2, dtype=torch.float32).to(device) for g in grads]
                )
            )
""",
            "            total_norm = many_tensors.total_norm(grads, device)\n",
        ),
        (
            _UTILS,
            "        for g in grads + expert_grads:\n            g.mul_(clip_coef)\n",
            "        many_tensors.multiply(grads + expert_grads, clip_coef)\n",
        ),
        (_OPTIMIZER, "from fairseq import utils\n", "from fairseq import many_tensors, utils\n"),
        (
            _OPTIMIZER,
            """        for p in self.params:
            if p.grad is not None:
                if torch.is_tensor(c):
                    c = c.to(p.grad.device)
                p.grad.data.mul_(c)
""",
            "        many_tensors.multiply((p.grad.data for p in self.params if p.grad is not None), c)\n",
        ),
        (_HALF, "from fairseq import optim\n", "from fairseq import many_tensors, optim\n"),
        (
            _HALF,
            """                devices = list(self.fp32_params.keys())
                device_params_dict = defaultdict(list)
                for p in self.fp16_params:
                    if p.requires_grad:
                        device_params_dict[p.device.index].append(p)
                for device in devices:
                    device_params = device_params_dict[device]
                    offset = 0
                    for p in device_params:
                        grad_data = (
                            p.grad.data
                            if p.grad is not None
                            else p.data.new_zeros(p.data.shape)
                        )
                        numel = grad_data.numel()
                        self.fp32_params[device].grad.data[
                            offset : offset + numel
                        ].copy_(grad_data.view(-1))
                        offset += numel
            else:
                for p, p32 in zip(self.fp16_params, self.fp32_params):
                    if not p.requires_grad:
                        continue
                    if p.grad is not None:
                        if p32.grad is None:
                            p32.grad = p.grad.data.float()
                        else:
                            p32.grad.data.copy_(p.grad.data)
                    else:
                        p32.grad = torch.zeros_like(p.data, dtype=torch.float)

            self._needs_sync = False
""",
            """                flat = {device: p.grad for device, p in self.fp32_params.items()}
                many_tensors.copy_gradients(*self._fp16_and_parts_of(flat))
            else:
                for p, p32 in zip(self.fp16_params, self.fp32_params):
                    if p.requires_grad and p32.grad is None:
                        new = torch.zeros_like if p is p32 else torch.empty_like
                        p32.grad = new(p.data, dtype=torch.float)
                pairs = [
                    (p, p32.grad.data)
                    for p, p32 in zip(self.fp16_params, self.fp32_params)
                    if p.requires_grad and p is not p32
                ]
                many_tensors.copy_gradients([p for p, _ in pairs], [x for _, x in pairs])

            self._needs_sync = False

    def _fp16_and_parts_of(self, flat):
        # the parameters of each device, and the parts of its flat tensor that are theirs
        params, parts = [], []
        for device, whole in flat.items():
            here = [p for p in self.fp16_params if p.device.index == device]
            params += here
            split = whole.detach().split([p.numel() for p in here])
            parts += [x.view(p.shape) for x, p in zip(split, here)]
        return params, parts
""",
        ),
        (
            _HALF,
            """            devices = list(self.fp32_params.keys())
            device_params_dict = defaultdict(list)
            for p in self.fp16_params:
                device_params_dict[p.device.index].append(p)
            for device in devices:
                device_params = device_params_dict[device]
                offset = 0
                for p in device_params:
                    numel = p.data.numel()
                    p.data.copy_(
                        self.fp32_params[device]
                        .data[offset : offset + numel]
                        .view_as(p.data)
                    )
                    offset += numel
        else:
            for p, p32 in zip(self.fp16_params, self.fp32_params):
                if not p.requires_grad:
                    continue
                p.data.copy_(p32.data)
""",
            """            params, parts = self._fp16_and_parts_of(self.fp32_params)
        else:
            pairs = [
                (p, p32.data)
                for p, p32 in zip(self.fp16_params, self.fp32_params)
                if p.requires_grad and p is not p32
            ]
            params, parts = [p for p, _ in pairs], [x for _, x in pairs]
        many_tensors.copy([p.data for p in params], parts)
""",
        ),
        (
            _HALF,
            """            for p32 in self.fp32_params:
                if p32.grad is not None:
                    p32.grad.zero_()
""",
            "            for p32 in self.fp32_params:\n                p32.grad = None\n",
        ),
        (_HALF, "from collections import defaultdict\nfrom itertools", "from itertools"),
    ],
    # The moving average of the parameters, as well, which was then copied onto itself.
    "moving_average_together": [
        (
            _EMA,
            """        ema_state_dict = {}
        ema_params = (
""",
            """        ema_state_dict, averages, values = {}, [], []
        ema_params = (
""",
        ),
        (
            _EMA,
            """            else:
                ema_param.mul_(decay)
                ema_param.add_(param.to(dtype=ema_param.dtype), alpha=1 - decay)
            ema_state_dict[key] = ema_param
        self.restore(ema_state_dict, build_fp32_params=False)
""",
            """            else:
                averages.append(ema_param)
                values.append(param)
            ema_state_dict[key] = ema_param
        many_tensors.average(averages, values, decay)
        own = self.model.state_dict()
        apart = [k for k, x in ema_state_dict.items() if k in own and x is not own[k]]
        many_tensors.copy([own[k] for k in apart], [ema_state_dict[k] for k in apart])
""",
        ),
        (_EMA, "from fairseq import checkpoint_utils\n", "from fairseq import checkpoint_utils, many_tensors\n"),
    ],
}
