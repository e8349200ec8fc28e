"""What makes a run of fairseq that is taken up another one than if it had not stopped; and what keeps it off CPUs.

Each row of a cure: a file, what stands there, and what takes its place (`fairseq_cures.Edit`).
"""

_HALF = "fairseq/optim/fp16_optimizer.py"
_PROCESSES = "fairseq/distributed/utils.py"
_TRAINER = "fairseq/trainer.py"
_WRAPPERS = "fairseq/models/distributed_fairseq_model.py"

RUN_CURES: dict[str, list[tuple[str, str, str]]] = {
    # A run that was taken up in mid-epoch with another --update-freq ended the epoch a batch too early, and then read
    # the epoch again; or failed, where less than an update was left of it.
    "rest_of_an_epoch": [
        (
            "fairseq/data/iterators.py",
            "        if skip_remainder_batch:\n"
            "            total_num_itrs = int(math.floor(len(iterable) / float(chunk_size)))\n",
            '        done = getattr(iterable, "n", 0)\n'
            "        start, left = math.ceil(done / chunk_size), len(iterable) - done\n"
            "        if skip_remainder_batch:\n            total_num_itrs = start + left // chunk_size\n",
        ),
        (
            "fairseq/data/iterators.py",
            "total_num_itrs = int(math.ceil(len(iterable) / float(chunk_size)))\n",
            "total_num_itrs = start + math.ceil(left / chunk_size)\n",
        ),
        (
            "fairseq/data/iterators.py",
            "            iterable.take(total_num_itrs * chunk_size)\n",
            "            iterable.take(done + left // chunk_size * chunk_size)\n",
        ),
    ],
    # A checkpoint of --fp16 and --bf16 had the weights in 16 bits alone, and of the loss scale no count of the updates
    # since it changed: a run that was taken up was another one.
    "whole_half_precision": [
        (
            _HALF,
            """        state_dict = self.fp32_optimizer.state_dict()
        if self.scaler is not None:
            state_dict["loss_scale"] = self.scaler.loss_scale
""",
            """        state_dict = self.fp32_optimizer.state_dict()
        state_dict["fp32_params"] = [p.detach() for p in self._list_fp32_params()]
        if self.scaler is not None:
            state_dict["loss_scale"] = self.scaler.loss_scale
            state_dict["loss_scaler"] = self.scaler.counts()
""",
        ),
        (
            _HALF,
            """            self.scaler.loss_scale = state_dict["loss_scale"]
        self.fp32_optimizer.load_state_dict(state_dict, optimizer_overrides)
""",
            """            self.scaler.loss_scale = state_dict["loss_scale"]
            vars(self.scaler).update(state_dict.get("loss_scaler", {}))
        kept = state_dict.get("fp32_params", [])
        params = self._list_fp32_params()
        if [p.shape for p in params] == [p.shape for p in kept]:
            for p, known in zip(params, kept):
                p.data.copy_(known)
        self.fp32_optimizer.load_state_dict(state_dict, optimizer_overrides)

    def _list_fp32_params(self):
        if torch.is_tensor(self.fp32_params):
            return [self.fp32_params]
        if isinstance(self.fp32_params, dict):
            return list(self.fp32_params.values())
        return list(self.fp32_params)
""",
        ),
        (
            _HALF,
            """        state_dict = self.wrapped_optimizer.state_dict()
        if self.scaler is not None:
            state_dict["loss_scale"] = self.scaler.loss_scale
""",
            """        state_dict = self.wrapped_optimizer.state_dict()
        if self.scaler is not None:
            state_dict["loss_scale"] = self.scaler.loss_scale
            state_dict["loss_scaler"] = self.scaler.counts()
""",
        ),
        (
            _HALF,
            """            self.scaler.loss_scale = state_dict["loss_scale"]

        self.wrapped_optimizer.load_state_dict(state_dict, optimizer_overrides)
""",
            """            self.scaler.loss_scale = state_dict["loss_scale"]
            vars(self.scaler).update(state_dict.get("loss_scaler", {}))

        self.wrapped_optimizer.load_state_dict(state_dict, optimizer_overrides)
""",
        ),
        (
            "fairseq/optim/dynamic_loss_scaler.py",
            "    def scale(self, outputs):\n",
            "    def counts(self):\n"
            '        return {k: v for k, v in vars(self).items() if k.startswith("_")}\n\n'
            "    def scale(self, outputs):\n",
        ),
        # After an overflow.
        (_TRAINER, "torch.tensor(0.0).cuda()", "torch.tensor(0.0, device=self.device)"),
    ],
    # --ema-update-freq counted from where a run was taken up.
    "moving_average_of_the_same_updates": [
        (
            "fairseq/models/ema/ema.py",
            "            self.update_freq_counter += 1\n",
            "            self.update_freq_counter += 1\n"
            "            if updates is not None:\n"
            "                freq = self.config.ema_update_freq\n"
            "                self.update_freq_counter = updates % freq or freq\n",
        )
    ],
    # Of a CPU there is one, which has no number; its processes talk by gloo, and are not started by fairseq.
    "processes_on_cpus": [
        (
            _WRAPPERS,
            "            device_ids=[args.device_id],\n            output_device=args.device_id,\n",
            '            device_ids=None if device.type == "cpu" else [args.device_id],\n'
            '            output_device=None if device.type == "cpu" else args.device_id,\n',
        ),
        (
            _PROCESSES,
            "            dist.init_process_group(\n"
            "                backend=cfg.distributed_training.distributed_backend,\n",
            "            backend = cfg.distributed_training.distributed_backend\n"
            '            if backend == "nccl" and (cfg.common.cpu or not torch.cuda.is_available()):\n'
            '                backend = "gloo"\n'
            "            dist.init_process_group(\n                backend=backend,\n",
        ),
        (
            _PROCESSES,
            "def _infer_single_node_init(cfg: DistributedTrainingConfig):\n",
            "def _infer_single_node_init(cfg: DistributedTrainingConfig):\n"
            "    if not torch.cuda.is_available():\n"
            "        size = cfg.distributed_world_size\n"
            "        raise SystemExit(\n"
            '            f"distributed_world_size is {size}, and there is no GPU; without it, "\n'
            '            f"start processes on CPUs so: torchrun --nproc_per_node {size} $(which fairseq-train) ..."\n'
            "        )\n",
        ),
    ],
    # --ddp-backend fully_sharded wants fairscale, whose last release is of 2022. `fairseq_fully_sharded.py` takes its
    # place; the optimizer of --fp16 and --bf16 needs no copies in float32 of parts that are in float32.
    "sharded_by_torch": [
        (
            _TRAINER,
            """            import fairscale

            if self.cfg.common.bf16:
                raise ValueError(
                    "FullyShardedDataParallel is not compatible with --bf16 or "
                    "--memory-efficient-bf16"
                )
            if self.cfg.distributed_training.zero_sharding != "none":
                raise ValueError(
                    "FullyShardedDataParallel is not compatible with --zero-sharding "
                    "option (it's already built in)"
                )
            if (
                max(self.cfg.optimization.update_freq) > 1
                and fairscale.__version__ < "0.4.0"
            ):
                raise RuntimeError(
                    "Please update to fairscale 0.4.0 or newer when combining "
                    "--update-freq with FullyShardedDataParallel"
                )
""",
            "            check_options(cfg)\n",
        ),
        (
            _TRAINER,
            "from fairseq.distributed import utils as distributed_utils\n",
            "from fairseq.distributed import utils as distributed_utils\n"
            "from fairseq.distributed.fully_sharded_data_parallel import check_options\n",
        ),
        (
            _TRAINER,
            "        if not self.is_fsdp:\n            if cfg.common.fp16:\n",
            "        in_16_bits = cfg.common.memory_efficient_fp16 or cfg.common.memory_efficient_bf16\n"
            "        if not self.is_fsdp or in_16_bits:\n            if cfg.common.fp16:\n",
        ),
        (
            _TRAINER,
            """        if self.is_fsdp and self.cfg.common.fp16:
            # FullyShardedDataParallel always uses MemoryEfficientFP16 wrapper,
            # mostly for the grad scaling. But if we don't have the
            # --memory-efficient-fp16 flag set, then we're effectively doing
            # regular --fp16 and can allow the use of optimizers that would
            # otherwise be unsupported by MemoryEfficientFP16Optimizer.
            allow_unsupported = not self.cfg.common.memory_efficient_fp16
            self._optimizer = optim.MemoryEfficientFP16Optimizer.build_optimizer(
                self.cfg, params, allow_unsupported=allow_unsupported
            )
        elif self""",
            "        if self",
        ),
        (
            _HALF,
            "        fp32_params = cls.build_fp32_params(cfg.optimizer, params, flatten=flatten)\n",
            "        if all(p.dtype == torch.float32 for p in params):  # parts of a model in 16 bits\n"
            "            fp32_params, flatten = params, False\n"
            "        else:\n"
            "            fp32_params = cls.build_fp32_params(cfg.optimizer, params, flatten=flatten)\n",
        ),
        (
            _TRAINER,
            '        return self.cfg.distributed_training.ddp_backend == "fully_sharded"\n',
            "        backend = self.cfg.distributed_training.ddp_backend\n"
            '        return backend == "fully_sharded" and self.data_parallel_world_size > 1\n',
        ),
        (
            _TRAINER,
            """        if self.is_fsdp:
            # save meta data for recombining checkpoint upon loading
            state_dict["fsdp_metadata"] = self.model.local_metadata_dict()
""",
            "",
        ),
        (_TRAINER, "total_norm = total_norm.cuda().float() ** 2", "total_norm = total_norm.float() ** 2"),
        (
            _WRAPPERS,
            """        try:
            from fairscale.nn.data_parallel import FullyShardedDataParallel as FSDP
        except ImportError:
            raise ImportError(
                "Cannot find FullyShardedDataParallel. "
                "Please install fairscale with: pip install fairscale"
            )
        assert isinstance(model, FSDP), "expected model to already be wrapped in FSDP"
        wrapped_model = model
        if args.memory_efficient_fp16:
            wrapped_model = wrapped_model.half()
        if not args.cpu_offload:
            wrapped_model = wrapped_model.to(device=device)
""",
            "        wrapped_model = FullyShardedDataParallel(model, args, process_group, device)\n",
        ),
        (
            _WRAPPERS,
            "    DistributedTimeoutWrapper,\n    Legacy",
            "    DistributedTimeoutWrapper,\n    FullyShardedDataParallel,\n    Legacy",
        ),
        (
            "fairseq/dataclass/configs.py",
            '    fp16: bool = II("common.fp16")\n    memory_efficient_fp16: bool = II("common.memory_efficient_fp16")\n'
            '    tpu: bool = II("common.tpu")\n    # configuration',
            '    fp16: bool = II("common.fp16")\n    bf16: bool = II("common.bf16")\n'
            '    memory_efficient_fp16: bool = II("common.memory_efficient_fp16")\n'
            '    tpu: bool = II("common.tpu")\n    # configuration',
        ),
        (
            "fairseq/dataclass/constants.py",
            "FullyShardedDataParallel from fairscale",
            "parameters in parts, by torch's fully_shard",
        ),
    ],
    # --no-save needs no folder that can be written to, and none to itself.
    "no_folder_for_nothing": [
        (
            "fairseq_cli/train.py",
            "    if distributed_utils.is_master(cfg.distributed_training):\n"
            "        checkpoint_utils.verify_checkpoint_directory(",
            "    if distributed_utils.is_master(cfg.distributed_training) and not cfg.checkpoint.no_save:\n"
            "        checkpoint_utils.verify_checkpoint_directory(",
        )
    ],
}
