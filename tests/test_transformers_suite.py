"""The tests that all models of Transformers share, run as they are on the classes here: `make test-transformers`.

What does not apply is left out by name, with the reason, in `LEFT_OUT`.
"""

import unittest

import pytest
import torch
import transformers_tests
from processes import as_processes

from modeling_xl import (
    XLConfig,
    XLForCausalLM,
    XLForQuestionAnswering,
    XLForSequenceClassification,
    XLForTokenClassification,
    XLModel,
)

pytestmark = pytest.mark.clients
if not transformers_tests.FOLDER:
    pytest.skip("the tests of Transformers are not here; `make test-transformers` fetches them", allow_module_level=True)
pytest.importorskip("parameterized")

common, training, tensor_parallel, fsdp, configuration = (
    transformers_tests.load(f"test_{name}")
    for name in ("modeling_common", "training_mixin", "tensor_parallel_mixin", "fsdp_mixin", "configuration_common")
)
tensor_parallel.TP_DISTRIBUTED_TEST_MODEL_TYPES = fsdp.FSDP_DISTRIBUTED_TEST_MODEL_TYPES = None  # all model types
# By these the tests know which labels a class takes.
for names, of_ours in (
    ("MODEL_MAPPING_NAMES", XLModel),
    ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", XLForCausalLM),
    ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", XLForSequenceClassification),
    ("MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES", XLForTokenClassification),
    ("MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES", XLForQuestionAnswering),
):
    setattr(common, names, {**getattr(common, names), XLConfig.model_type: of_ours.__name__})

LEFT_OUT = {
    "test_generation_tester_mixin_inheritance": "tests of generation are not in the distribution; ours: test_generate.py",
    "test_model_rope_scaling_from_config_1_dynamic": "a type that follows the running length contradicts keys rotated before",
    "test_eager_matches_sdpa_inference_24_fp32_pad_left_output_attentions": "only eager has weights; asking sdpa is an error",
}
# Weights are only had from the eager form; another that is asked for them says so.
EAGER = {"test_model_outputs_equivalence"}


class Tester:
    """Says to the tests how small a model and which inputs they get."""

    base_model_class, causal_lm_class = XLModel, XLForCausalLM
    batch_size, seq_length, is_training = 3, 7, True
    vocab_size, hidden_size, num_hidden_layers, num_attention_heads = 99, 32, 2, 2
    num_labels, type_sequence_label_size = 3, 2

    def __init__(self, fields: dict):
        self.fields = fields

    def get_config(self) -> XLConfig:
        names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        sizes = {name: getattr(self, name) for name in names}
        ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        return XLConfig(**sizes, **ids, intermediate_size=37, num_labels=self.num_labels, **self.fields)

    def prepare_config_and_inputs_for_common(self):
        ids = common.ids_tensor([self.batch_size, self.seq_length], self.vocab_size - 3) + 3
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def prepare_config_and_inputs(self):
        return self.prepare_config_and_inputs_for_common()


# The texts of most tests, of 7 tokens, lie within a segment: some follow gradients through what is handed out, which is a copy
# where several segments are joined, or count on one run of a layer a call. The others are of 64 tokens and more.
LONG = {"segment_len": 8, "mem_len": 64}
SHORT = {"segment_len": 8, "mem_len": 4}
SLOTS = {"segment_len": 8, "mem_len": 8, "compressed_mem_len": 8, "compression_rate": 2}
KINDS = {
    "xl_recurrence": {"position_type": "xl", **LONG},
    "xl_recurrence_short": {"position_type": "xl", **SHORT},
    "rope_none": {"position_type": "rope", "memory_type": "none"},
    "rope_recurrence_short": {"position_type": "rope", **SHORT},
    "t5_recurrence": {"position_type": "t5", **LONG},
    "t5_compressive": {"position_type": "t5", "memory_type": "compressive", **SLOTS},
    "alibi_linear": {"position_type": "alibi", "memory_type": "linear"},
    "alibi_recurrence": {"position_type": "alibi", **LONG},
    "none_recurrence_short": {"position_type": "none", **SHORT},
}


class Common(
    common.ModelTesterMixin, training.TrainingTesterMixin, tensor_parallel.TensorParallelTesterMixin, fsdp.FSDPTesterMixin
):
    all_model_classes = (XLModel, XLForCausalLM, XLForSequenceClassification, XLForTokenClassification, XLForQuestionAnswering)
    fields: dict
    model_tester = None
    test_can_init_all_missing_weights_before_2023 = True  # else it is left out, for the files bear no year

    @pytest.fixture(autouse=True)
    def _with_processes(self, forks, request):
        transformers_tests.start = lambda number, *call: as_processes(forks, number, *call)
        reason = LEFT_OUT.get(request.node.name)
        if "_rope_" in request.node.name and self.fields["position_type"] != "rope":
            reason = "this scheme rotates nothing"
        if reason:
            pytest.skip(reason)

    @property
    def has_attentions(self) -> bool:
        return self.fields.get("memory_type") != "linear"

    def setUp(self):
        eager = {"attn_implementation": "eager"} if self._testMethodName in EAGER else {}
        self.model_tester = Tester(self.fields | eager)

    def test_config(self):
        configuration.ConfigTester(self, config_class=XLConfig).run_common_tests()


for _name, _fields in KINDS.items():
    globals()[f"Test_{_name}"] = type(f"Test_{_name}", (Common, unittest.TestCase), {"fields": _fields, "__test__": True})
del Common
