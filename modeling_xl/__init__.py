"""A decoder language model with selectable positions and selectable bounded memory, for Transformers.

Importing the package registers its classes with the Auto classes of Transformers.
"""

import transformers

from .cache_xl import XLCache
from .configuration_xl import XLConfig
from .modeling_xl import (
    AUTO_CLASSES,
    XLForCausalLM,
    XLForQuestionAnswering,
    XLForSequenceClassification,
    XLForTokenClassification,
    XLModel,
    XLPreTrainedModel,
)
from .transfo_xl_loader import TransfoXLConfig, TransfoXLLMHeadModel, TransfoXLModel

__version__ = "0.1.0"

transformers.AutoConfig.register("xl", XLConfig, exist_ok=True)
for _name, _model in AUTO_CLASSES.items():
    getattr(transformers, _name).register(XLConfig, _model, exist_ok=True)
# Folders of Transformers' former Transformer-XL load as models of this package.
transformers.AutoConfig.register(TransfoXLConfig.model_type, TransfoXLConfig, exist_ok=True)
transformers.AutoModel.register(TransfoXLConfig, TransfoXLModel, exist_ok=True)
transformers.AutoModelForCausalLM.register(TransfoXLConfig, TransfoXLLMHeadModel, exist_ok=True)

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
