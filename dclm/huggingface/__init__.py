"""Decoders for Hugging Face `transformers`: importing this module registers them with the Auto classes.

import dclm.huggingface
model = transformers.AutoModelForCausalLM.from_pretrained("DCFormer-2.8B")
"""

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from .configuration import DCFormerConfig, DCLMConfig, DCPythiaConfig
from .modeling import DCFormerForCausalLM, DCLMForCausalLM, DCLMForMaskedLM, DCPythiaForCausalLM

for config, model in (
    (DCFormerConfig, DCFormerForCausalLM),
    (DCPythiaConfig, DCPythiaForCausalLM),
    (DCLMConfig, DCLMForCausalLM),
):
    AutoConfig.register(config.model_type, config)
    AutoModelForCausalLM.register(config, model)
AutoModelForMaskedLM.register(DCLMConfig, DCLMForMaskedLM)

__all__ = [
    "DCFormerConfig",
    "DCFormerForCausalLM",
    "DCLMConfig",
    "DCLMForCausalLM",
    "DCLMForMaskedLM",
    "DCPythiaConfig",
    "DCPythiaForCausalLM",
]
