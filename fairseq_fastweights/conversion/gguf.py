"""Unpacks GGUF files, which llama.cpp reads, into Hugging Face folders."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fairseq_fastweights.conversion.families.table import FAMILIES
from fairseq_fastweights.conversion.files.weight_files import check_regular, first_line
from fairseq_fastweights.conversion.from_huggingface import check_layers
from fairseq_fastweights.invalid_input import InvalidInput

SUFFIX = ".gguf"
_SCALING = re.compile(r"\.rope\.scaling\.|^rope_(freqs|factors)")


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """A temporary folder with the configuration, the tokenizer and, in float32, the weights of the model in a file.

    transformers reads the file; weights that are stored in fewer bits become the numbers that these stand for.
    """
    try:
        import gguf
        from safetensors.torch import save_file

        transformers: Any = import_module("transformers")
        load: Any = import_module("transformers.modeling_gguf_pytorch_utils").load_gguf_checkpoint
    except ImportError as error:
        raise InvalidInput(
            f"{path}: reading it needs transformers and gguf: pip install transformers gguf ({error})"
        ) from None

    class Reader(gguf.GGUFReader):
        """gguf's own takes what is there beyond the file's end, and counts an array's numbers without end."""

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            found = super()._get(offset, dtype, count, override_order)
            if len(found) < count:
                raise InvalidInput("it is cut short or damaged: a count in it is larger than the file")
            return found

    check_regular(path)
    place = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name, "trust_remote_code": False}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            file = Reader(path)
            config = transformers.AutoConfig.from_pretrained(**place)
            if config.model_type not in FAMILIES:
                raise InvalidInput(f"its model_type is {config.model_type!r}; it must be one of {', '.join(FAMILIES)}")
            check_layers(path, config.to_dict(), len(file.tensors))
            scaling = [x for x in [*file.fields, *(tensor.name for tensor in file.tensors)] if _SCALING.search(x)]
            if scaling:  # transformers would leave it out in silence
                raise InvalidInput(f"it has {scaling[0]}; scaled rotary embeddings of such files are not supported")
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(config)  # for the names of its weights
            weights = load(str(path), return_tensors=True, model_to_load=model)["tensors"]
            tokenizer = transformers.AutoTokenizer.from_pretrained(**place)
        except Exception as error:  # its type depends on the place of the damage
            raise InvalidInput(f"{path} cannot be read as a GGUF file ({first_line(error)})") from None
        # The file has settings in float32: 1e-5 is 9.999999747378752e-06 in it.
        config.architectures = [type(model).__name__]  # by which llama.cpp knows models
        settings = json.loads(config.to_json_string(), parse_float=lambda text: float(str(np.float32(text))))
        (folder / "config.json").write_text(json.dumps(settings))
        tokenizer.save_pretrained(folder)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        yield folder
