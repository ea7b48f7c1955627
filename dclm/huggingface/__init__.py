"""DCFormer and DCPythia for Hugging Face's library: importing this registers them with its Auto classes.

import dclm.huggingface
model = transformers.AutoModelForCausalLM.from_pretrained("DCFormer-2.8B")
"""

from transformers import AutoConfig, AutoModelForCausalLM

from .configuration import DCFormerConfig, DCPythiaConfig
from .modeling import DCFormerForCausalLM, DCPythiaForCausalLM

for config, model in ((DCFormerConfig, DCFormerForCausalLM), (DCPythiaConfig, DCPythiaForCausalLM)):
    AutoConfig.register(config.model_type, config)
    AutoModelForCausalLM.register(config, model)

__all__ = ["DCFormerConfig", "DCFormerForCausalLM", "DCPythiaConfig", "DCPythiaForCausalLM"]
