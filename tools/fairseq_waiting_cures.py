"""What waits for a GPU within an update, and what does not.

Each row of a cure: a file, what stands there, and what takes its place (`fairseq_cures.Edit`).
"""

_HALF = "fairseq/optim/fp16_optimizer.py"
_UTILS = "fairseq/utils.py"
_AMP = "fairseq/optim/amp_optimizer.py"
_METERS = "fairseq/logging/meters.py"
_TRAINER = "fairseq/trainer.py"
_ENCODER = "fairseq/models/transformer/transformer_encoder.py"
_DECODER = "fairseq/models/transformer/transformer_decoder.py"
_ADAPTIVE_INPUT = "fairseq/modules/adaptive_input.py"
_ADAPTIVE_SOFTMAX = "fairseq/modules/adaptive_softmax.py"
_SMOOTHED = "fairseq/criterions/label_smoothed_cross_entropy.py"
_ADAPTIVE_LOSS = "fairseq/criterions/adaptive_loss.py"

WAITING_CURES: dict[str, list[tuple[str, str, str]]] = {
    # A GPU is asked nothing that the CPU knows: batches remember where they came from.
    "asked_on_the_cpu": [
        (
            _UTILS,
            """        # non_blocking is ignored if tensor is not pinned, so we can always set
        # to True (see github.com/PyTorchLightning/pytorch-lightning/issues/620)
        return tensor.to(device=device, non_blocking=True)

    return apply_to_sample(_move_to_cuda, sample)
""",
            """        return host_copies.move(tensor, device)

    return apply_to_sample(_move_to_cuda, sample)
""",
        ),
        (
            _UTILS,
            "    device = device or torch.cuda.current_device()\n",
            """    device = device or torch.device("cuda", torch.cuda.current_device())\n""",
        ),
        (_UTILS, "from torch import Tensor\n", "from torch import Tensor\nfrom fairseq import host_copies\n"),
        (
            _ENCODER,
            """        has_pads = src_tokens.device.type == "xla" or encoder_padding_mask.any()
""",
            """        if torch.jit.is_scripting():
            has_pads = bool(encoder_padding_mask.any())
        else:
            has_pads = src_tokens.device.type == "xla" or host_copies.contains(
                src_tokens, self.padding_idx
            )
""",
        ),
        (_ENCODER, "from fairseq import utils\n", "from fairseq import host_copies, utils\n"),
        (
            _DECODER,
            "        if self.cross_self_attention or prev_output_tokens.eq(self.padding_idx).any():\n",
            """        if torch.jit.is_scripting():
            has_pads = bool(prev_output_tokens.eq(self.padding_idx).any())
        else:
            has_pads = host_copies.contains(prev_output_tokens, self.padding_idx)
        if self.cross_self_attention or has_pads:
""",
        ),
        (_DECODER, "from fairseq import utils\n", "from fairseq import host_copies, utils\n"),
        # Of the numbers of several processes those that are on CPUs (words, sentences) are read once.
        (
            "fairseq/distributed/utils.py",
            "    cpu_data = _all_reduce_dict(cpu_data)\n",
            "    cpu_data = _all_reduce_dict(cpu_data)\n"
            "    if cpu_data:\n"
            "        read = torch.cat([t.view(-1) for t in cpu_data.values()]).cpu()\n"
            "        parts = read.split([t.numel() for t in cpu_data.values()])\n"
            "        cpu_data = {k: x.view_as(t) for (k, t), x in zip(cpu_data.items(), parts)}\n",
        ),
    ],
    # The adaptive input and softmax asked, for every band, which words are in it, and the loss whether they are.
    "bands_without_waiting": [
        (
            _ADAPTIVE_INPUT,
            """        result = self._float_tensor.new(input.shape + (self.embedding_dim,))
        for i in range(len(self.cutoff)):
            mask = input.lt(self.cutoff[i])
            if i > 0:
                mask.mul_(input.ge(self.cutoff[i - 1]))
                chunk_input = input[mask] - self.cutoff[i - 1]
            else:
                chunk_input = input[mask]
            if mask.any():
                result[mask] = self.embeddings[i](chunk_input)
        return result
""",
            """        found = bands.find(input, self.cutoff)
        results = [
            self.embeddings[i](numbers).to(self._float_tensor.dtype)
            for i, numbers in enumerate(found.numbers)
            if numbers is not None
        ]
        if not results:
            return self._float_tensor.new(input.shape + (self.embedding_dim,))
        result = torch.cat(results).index_select(0, found.back)
        return result.view(input.shape + (self.embedding_dim,))
""",
        ),
        (
            _ADAPTIVE_INPUT,
            "from fairseq.modules.quant_noise import",
            "from fairseq.modules import bands\nfrom fairseq.modules.quant_noise import",
        ),
        (
            _ADAPTIVE_SOFTMAX,
            """        target = target.view(-1)
        new_target = [target.clone()]
        target_idxs = []

        for i in range(len(self.cutoff) - 1):
            mask = target.ge(self.cutoff[i]).mul(target.lt(self.cutoff[i + 1]))
            new_target[0][mask] = self.cutoff[0] + i

            if mask.any():
                target_idxs.append(mask.nonzero(as_tuple=False).squeeze(1))
                new_target.append(target[mask].add(-self.cutoff[i]))
            else:
                target_idxs.append(None)
                new_target.append(None)

        return new_target, target_idxs
""",
            """        found = bands.find(target, self.cutoff)
        return [found.heads, *found.numbers[1:]], found.places[1:]
""",
        ),
        (
            _ADAPTIVE_SOFTMAX,
            """        out = self._float_tensor.new(inp_sz, self.out_dim)
        out[:, : self.num_words] = self.word_proj(input.view(inp_sz, -1))
        out[:, self.num_words :] = self.class_proj(input.view(inp_sz, -1))
        return out
""",
            """        input = input.view(inp_sz, -1)
        out = torch.cat([self.word_proj(input), self.class_proj(input)], dim=1)
        return out.to(self._float_tensor.dtype)
""",
        ),
        (
            _ADAPTIVE_SOFTMAX,
            "from fairseq.modules.fairseq_dropout import",
            "from fairseq.modules import bands\nfrom fairseq.modules.fairseq_dropout import",
        ),
        (
            _ADAPTIVE_LOSS,
            "                assert target[i].min() >= 0 and target[i].max() <= logits[i].size(1)\n",
            "",
        ),
        (
            _ADAPTIVE_LOSS,
            """        orig = utils.strip_pad(orig_target, self.padding_idx)
        ntokens = orig.numel()
""",
            """        words = host_copies.on_host(orig_target).numpy()
        ntokens = int((words != self.padding_idx).sum())
""",
        ),
        (
            _ADAPTIVE_LOSS,
            """        loss_sum = utils.item(sum(log.get("loss", 0) for log in logging_outputs))
""",
            """        loss_sum = sum(log.get("loss", 0) for log in logging_outputs)
""",
        ),
        (_ADAPTIVE_LOSS, "from fairseq import metrics, utils\n", "from fairseq import host_copies, metrics, utils\n"),
    ],
    # --report-accuracy asked twice an update.
    "accuracy_without_waiting": [
        (
            _SMOOTHED,
            """            logging_output["n_correct"] = utils.item(n_correct.data)
            logging_output["total"] = utils.item(total.data)
""",
            """            logging_output["n_correct"] = n_correct.data
            logging_output["total"] = total.data
""",
        ),
        (
            _SMOOTHED,
            """        n_correct = torch.sum(
            lprobs.argmax(1).masked_select(mask).eq(target.masked_select(mask))
        )
""",
            "        n_correct = torch.sum(lprobs.argmax(1).eq(target) & mask)\n",
        ),
        (
            _SMOOTHED,
            """        total = utils.item(sum(log.get("total", 0) for log in logging_outputs))
        if total > 0:
            metrics.log_scalar("total", total)
            n_correct = utils.item(
                sum(log.get("n_correct", 0) for log in logging_outputs)
            )
""",
            """        if any("total" in log for log in logging_outputs):
            metrics.log_scalar("total", sum(log.get("total", 0) for log in logging_outputs))
            n_correct = sum(log.get("n_correct", 0) for log in logging_outputs)
""",
        ),
    ],
    # Losses and norms were read after every update; they are when somebody asks for them, as at --log-interval.
    "read_when_asked": [
        (
            _METERS,
            """    def update(self, val, n=1):
        if val is not None:
            self.val = val
            if n > 0:
""",
            """    def update(self, val, n=1):
        if val is not None and not is_kept(self, val, n):
            self.val = val
            if n > 0:
""",
        ),
        (
            _METERS,
            """    def update(self, val):
        if val is not None:
            self.sum""",
            """    def update(self, val):
        if val is not None and not is_kept(self, val):
            self.sum""",
        ),
        (
            _METERS,
            """    def update(self, val=1):
        self.n = type_as(self.n, val) + val
        self.i += 1
""",
            """    def update(self, val=1):
        if not is_kept(self, val):
            self.n = type_as(self.n, val) + val
            self.i += 1
""",
        ),
        (
            _METERS,
            """    \"\"\"Computes and stores the average and current value\"\"\"

""",
            """    \"\"\"Computes and stores the average and current value\"\"\"

    val, sum, count = Settled(), Settled(), Settled()

""",
        ),
        (
            _METERS,
            """    \"\"\"Computes and stores the sum\"\"\"

""",
            """    \"\"\"Computes and stores the sum\"\"\"

    sum = Settled()

""",
        ),
        (
            _METERS,
            """    \"\"\"Computes the average occurrence of some event per second\"\"\"

""",
            """    \"\"\"Computes the average occurrence of some event per second\"\"\"

    n = Settled()

""",
        ),
        (
            _METERS,
            "from typing import Dict, Optional\n",
            "from typing import Dict, Optional\n\nfrom fairseq.logging.late_values import Settled, is_kept\n",
        ),
        (
            _TRAINER,
            """                logging_output = agg.get_smoothed_values()
                logging_output["sample_size"] = sample_size
                for key_to_delete in ["ppl", "wps", "wpb", "bsz"]:
                    if key_to_delete in logging_output:
                        del logging_output[key_to_delete]
""",
            """
                def read():
                    logging_output = agg.get_smoothed_values()
                    logging_output["sample_size"] = sample_size
                    for key_to_delete in ["ppl", "wps", "wpb", "bsz"]:
                        if key_to_delete in logging_output:
                            del logging_output[key_to_delete]
                    return logging_output

                logging_output = LateValues(read)
""",
        ),
        (
            _TRAINER,
            """        if grad_norm is not None and (
            not torch.is_tensor(grad_norm) or torch.isfinite(grad_norm)
        ):
""",
            "        if grad_norm is not None:\n",
        ),
        (
            _TRAINER,
            """                    torch.where(
                        grad_norm > self.cfg.optimization.clip_norm,
                        grad_norm.new_tensor(100),
                        grad_norm.new_tensor(0),
                    ),
""",
            "                    100.0 * (grad_norm > self.cfg.optimization.clip_norm),\n",
        ),
        (
            _TRAINER,
            """                    else self.optimizer.scaler.get_scale()
""",
            """                    else self.optimizer.scale_to_log
""",
        ),
        (
            _AMP,
            """    @property
    def next_loss_scale(self):
""",
            """    @property
    def scale_to_log(self):
        scale = self.scaler._get_scale_async() if self.scaler.is_enabled() else None
        return self.scaler.get_scale() if scale is None else scale.clone()

    @property
    def next_loss_scale(self):
""",
        ),
        (
            _TRAINER,
            "from fairseq.logging import meters, metrics\n",
            "from fairseq.logging import meters, metrics\n"
            "from fairseq.logging.late_values import LateNumbers, LateValues\n",
        ),
        (_TRAINER, "numer / (sample_size or 1.0))\n", "numer / (sample_size + (sample_size == 0)))\n"),
        (
            _TRAINER,
            """                # Note: (sample_size or 1.0) handles the case of a zero gradient, in a
                # way that avoids CPU/device transfers in case sample_size is a GPU or
""",
            """                # Note: this handles the case of a zero gradient, in a
                # way that avoids CPU/device transfers in case sample_size is a GPU or
""",
        ),
    ],
    # Whether the norm is a number was asked several times an update. A loss scale needs that at once, and once; without
    # it, Adam itself leaves out a step on a GPU, and the error comes with the next update.
    "norms_read_once": [
        (
            _HALF,
            """        if self.scaler is not None:
            if grad_norm > max_norm""",
            """        if self.scaler is not None:
            grad_norm = grad_norm.cpu()
            if grad_norm > max_norm""",
        ),
        (
            _HALF,
            "            grad_norm_cpu = float(grad_norm)\n",
            "            grad_norm = grad_norm.cpu()\n            grad_norm_cpu = float(grad_norm)\n",
        ),
        (
            _AMP,
            "        if not torch.isfinite(grad_norm).all():\n",
            "        grad_norm = grad_norm.cpu()\n        if not torch.isfinite(grad_norm).all():\n",
        ),
        (
            _TRAINER,
            """                if (
                    not self.cfg.optimization.use_bmuf
                    and self.cfg.distributed_training.ddp_backend != "slowmo"
                ):
                    self._check_grad_norms(grad_norm)
                if not torch.isfinite(grad_norm).all():
""",
            """                norms, suspects = self._read_grad_norms(grad_norm, samples)
                self._check_grad_norms(norms)
                if norms is not None and not torch.isfinite(norms).all():
""",
        ),
        (
            _TRAINER,
            "        overflow = False\n        try:\n",
            "        overflow, suspects = False, samples\n        try:\n",
        ),
        (
            _TRAINER,
            "        except FloatingPointError:\n\n            self.consolidate",
            "        except FloatingPointError:\n            self._late_norms.take()\n            self.consolidate",
        ),
        (
            _TRAINER,
            "                for _, sample in enumerate(samples):\n",
            "                for _, sample in enumerate(suspects):\n",
        ),
        (
            _TRAINER,
            """    def _check_grad_norms(self, grad_norm):
        \"\"\"Check that grad norms are consistent across workers.\"\"\"
        if self._grad_norm_buf is not None:
            self._grad_norm_buf.zero_()
            self._grad_norm_buf[self.data_parallel_rank] = grad_norm
            distributed_utils.all_reduce(
                self._grad_norm_buf, group=self.data_parallel_process_group
            )

""",
            """    def _reads_late(self, grad_norm):
        \"\"\"Whether a norm is read an update later: Adam leaves out the step by itself.\"\"\"
        alone = getattr(self.optimizer.optimizer, "goes_together", False)
        return grad_norm.device.type == "cuda" and alone and not self.cfg.common.amp

    def _read_grad_norms(self, grad_norm, samples):
        \"\"\"Norms of one or all workers on the CPU, or None yet, and the samples they are of.\"\"\"
        distributed = self.cfg.distributed_training
        if (
            self._grad_norm_buf is not None
            and not self.cfg.optimization.use_bmuf
            and distributed.ddp_backend != "slowmo"
        ):
            self._grad_norm_buf.zero_()
            self._grad_norm_buf[self.data_parallel_rank] = grad_norm
            distributed_utils.all_reduce(
                self._grad_norm_buf, group=self.data_parallel_process_group
            )
            grad_norm = self._grad_norm_buf
        if not self._reads_late(grad_norm):
            return grad_norm.cpu(), samples
        self.optimizer.optimizer.skip = (~torch.isfinite(grad_norm)).any().float()
        return self._late_norms.exchange(grad_norm, samples)

    def _check_last_grad_norms(self):
        norms, _ = self._late_norms.take()
        self._check_grad_norms(norms)
        if norms is not None and not torch.isfinite(norms).all():
            raise FloatingPointError("gradients are Nan/Inf")

    def _check_grad_norms(self, grad_norms):
        \"\"\"Check that grad norms are consistent across workers.\"\"\"
        if grad_norms is not None and grad_norms.numel() > 1:

""",
        ),
        (
            _TRAINER,
            "            if not is_consistent(self._grad_norm_buf):\n",
            "            if not is_consistent(grad_norms):\n",
        ),
        (
            _TRAINER,
            "                    for r, n in enumerate(self._grad_norm_buf.tolist())\n",
            "                    for r, n in enumerate(grad_norms.tolist())\n",
        ),
        (
            _TRAINER,
            "        self._ema = None\n\n        # TODO",
            "        self._ema = None\n        self._late_norms = LateNumbers()\n\n        # TODO",
        ),
        (
            _TRAINER,
            "    def state_dict(self):\n        state_dict = {\n",
            "    def state_dict(self):\n        self._check_last_grad_norms()\n        state_dict = {\n",
        ),
    ],
}
