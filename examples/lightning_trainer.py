"""Train the `ImageClassifier` LightningModule with custom DataLoaders and Trainer on the digits of scikit-learn.

python examples/lightning_trainer.py
"""

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split

from dcvision import ImageClassifier

EPOCHS = 20


def main() -> float:
    """Train a model and return the accuracy on held-out images."""
    L.seed_everything(0)
    digits = load_digits()
    images = torch.tensor(digits.images * 15.9, dtype=torch.uint8)[:, None].expand(-1, 3, -1, -1)  # [1797, 3, 8, 8]
    train, val = random_split(TensorDataset(images, torch.tensor(digits.target)), [0.8, 0.2])
    model = ImageClassifier("dcvit_digits_patch2_8", num_classes=10, image_size=8, lr=2e-3, warmup_steps=20)
    trainer = L.Trainer(max_epochs=EPOCHS, accelerator="auto", devices=1, logger=False, enable_checkpointing=False)
    trainer.fit(model, DataLoader(train, batch_size=64, shuffle=True), DataLoader(val, batch_size=256))
    accuracy = trainer.callback_metrics["val/top1"].item()
    print(f"accuracy {100 * accuracy:.1f} %")
    return accuracy


if __name__ == "__main__":
    main()
