"""What makes a run of fairseq that is taken up another one than if it had not stopped; and what keeps it off CPUs.

Each row of a cure: a file, what stands there, and what takes its place (`fairseq_cures.Edit`).
"""

_HALF = "fairseq/optim/fp16_optimizer.py"
_PROCESSES = "fairseq/distributed/utils.py"

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
        ("fairseq/trainer.py", "torch.tensor(0.0).cuda()", "torch.tensor(0.0, device=self.device)"),
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
            "fairseq/models/distributed_fairseq_model.py",
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
