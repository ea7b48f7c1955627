"""Train a small DCFormer with the Trainer of transformers on the source code of Python's standard library.

pip install -e '.[huggingface]'
python examples/huggingface_trainer.py
"""

import sysconfig
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, set_seed

import dclm
from dclm.huggingface import DCLMConfig  # the import registers the models with transformers

LENGTH, STEPS, FILES = 128, 150, 60


def read_sequences() -> list[dict[str, torch.Tensor]]:
    """Read the source code and split it into sequences of bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:FILES]
    data = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    return [{"input_ids": part, "labels": part} for part in data[: len(data) // LENGTH * LENGTH].view(-1, LENGTH)]


def main() -> float:
    """Train a model, generate text, and return the validation loss in nats per byte."""
    set_seed(0)
    sequences = read_sequences()
    config = dclm.decoder_config(
        "dcformer_pp_debug", vocab_size=256, context_length=LENGTH, dim=128, num_heads=4, num_layers=2
    )
    model = AutoModelForCausalLM.from_config(DCLMConfig.from_decoder_config(config))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=16, learning_rate=2e-3, warmup_steps=20,
            lr_scheduler_type="cosine", logging_steps=50, save_strategy="no", report_to="none",
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=sequences[64:], eval_dataset=sequences[:64])
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
    prompt = torch.tensor([list(b"def main(")], device=model.device)
    ids = model.generate(prompt, max_new_tokens=60, do_sample=False)[0]
    print(f"loss {loss:.3f} nats per byte\n{bytes(ids.tolist()).decode(errors='replace')}")
    return loss


if __name__ == "__main__":
    main()
