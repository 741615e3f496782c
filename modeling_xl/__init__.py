"""A decoder language model with selectable positions and selectable bounded memory, for Transformers.

Importing the package registers its classes with the Auto classes of Transformers.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .cache_xl import XLCache
from .configuration_xl import XLConfig
from .modeling_xl import (
    XLForCausalLM,
    XLForQuestionAnswering,
    XLForSequenceClassification,
    XLForTokenClassification,
    XLModel,
    XLPreTrainedModel,
)
from .transfo_xl_loader import TransfoXLConfig, TransfoXLLMHeadModel, TransfoXLModel

__version__ = "0.1.0"

AutoConfig.register("xl", XLConfig, exist_ok=True)
AutoModel.register(XLConfig, XLModel, exist_ok=True)
AutoModelForCausalLM.register(XLConfig, XLForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(XLConfig, XLForSequenceClassification, exist_ok=True)
AutoModelForTokenClassification.register(XLConfig, XLForTokenClassification, exist_ok=True)
AutoModelForQuestionAnswering.register(XLConfig, XLForQuestionAnswering, exist_ok=True)
# Folders of Transformers' former Transformer-XL load as models of this package.
AutoConfig.register(TransfoXLConfig.model_type, TransfoXLConfig, exist_ok=True)
AutoModel.register(TransfoXLConfig, TransfoXLModel, exist_ok=True)
AutoModelForCausalLM.register(TransfoXLConfig, TransfoXLLMHeadModel, exist_ok=True)

__all__ = [
    "XLCache",
    "XLConfig",
    "XLForCausalLM",
    "XLForQuestionAnswering",
    "XLForSequenceClassification",
    "XLForTokenClassification",
    "XLModel",
    "XLPreTrainedModel",
]
