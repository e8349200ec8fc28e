"""Language models with mixers as classes of Hugging Face's `transformers`, without fairseq.

    import fairseq_fastweights.huggingface                   # registers the models with the Auto classes
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model.generate(**tokenizer("the meaning of", return_tensors="pt"), max_new_tokens=20)

`python -m fairseq_fastweights.conversion to-huggingface` makes such a folder of a checkpoint.
"""

try:
    import transformers
except ImportError as error:
    raise ImportError(f"{__name__} needs transformers: pip install transformers") from error

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fairseq_fastweights.huggingface.cache import FastWeightCache
from fairseq_fastweights.huggingface.configuration import FastWeightConfig
from fairseq_fastweights.huggingface.modeling import FastWeightForCausalLM, FastWeightModel
from fairseq_fastweights.huggingface.step import GenerationStep
from fairseq_fastweights.huggingface.tokenization import WordTokenizer

__all__ = [
    "FastWeightCache",
    "FastWeightConfig",
    "FastWeightForCausalLM",
    "FastWeightModel",
    "GenerationStep",
    "WordTokenizer",
]

transformers.AutoConfig.register(FastWeightConfig.model_type, FastWeightConfig, exist_ok=True)
transformers.AutoModel.register(FastWeightConfig, FastWeightModel, exist_ok=True)
transformers.AutoModelForCausalLM.register(FastWeightConfig, FastWeightForCausalLM, exist_ok=True)
transformers.AutoTokenizer.register(FastWeightConfig, fast_tokenizer_class=WordTokenizer, exist_ok=True)
# By this list the Trainer knows that the labels that it smooths are those of the next tokens.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[FastWeightConfig.model_type] = FastWeightForCausalLM.__name__
