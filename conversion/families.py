"""The index of families: add one by one import line and its class in the tuple."""

from .family import Family, ForeignFiles
from .from_bloom import BloomFamily
from .from_falcon import FalconFamily
from .from_gemma import GemmaFamily
from .from_gpt_neox import GPTNeoXFamily
from .from_gptj import GPTJFamily
from .from_llama import LlamaFamily
from .from_mistral import MistralFamily
from .from_mpt import MPTFamily
from .from_nemotron import NemotronFamily
from .from_olmo import OlmoFamily
from .from_phi import PhiFamily
from .from_phi3 import Phi3Family
from .from_qwen2 import Qwen2Family
from .from_qwen3 import Qwen3Family
from .from_stablelm import StableLmFamily
from .from_starcoder2 import Starcoder2Family
from .from_transfo_xl import TransfoXLFamily
from .from_transfo_xl_pytorch import TransfoXLPyTorch
from .from_transfo_xl_tensorflow import TransfoXLTensorFlow
from .from_xlnet import XLNetFamily

_CLASSES: tuple[type[Family], ...] = (
    TransfoXLFamily,
    TransfoXLPyTorch,
    TransfoXLTensorFlow,
    LlamaFamily,
    MistralFamily,
    Qwen2Family,
    Qwen3Family,
    PhiFamily,
    Phi3Family,
    StableLmFamily,
    OlmoFamily,
    Starcoder2Family,
    GemmaFamily,
    NemotronFamily,
    GPTNeoXFamily,
    GPTJFamily,
    BloomFamily,
    MPTFamily,
    FalconFamily,
    XLNetFamily,
)
FAMILIES: dict[str, Family] = {family.name: family() for family in _CLASSES}
BY_MODEL_TYPE: dict[str, Family] = {kind: family for family in FAMILIES.values() for kind in family.model_types}
BY_FILES: list[ForeignFiles] = [family for family in FAMILIES.values() if isinstance(family, ForeignFiles)]
