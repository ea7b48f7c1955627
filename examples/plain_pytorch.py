"""Train a timm model with composed attention on the digits of scikit-learn in a plain PyTorch loop.

python examples/plain_pytorch.py
"""

import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split

from dcmha import DCAttention

EPOCHS = 20


def main() -> float:
    """Train a model and return the accuracy on held-out images."""
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1  # [1797, 1, 8, 8]
    train, val = random_split(TensorDataset(images, torch.tensor(digits.target)), [0.8, 0.2])
    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=8, patch_size=2, in_chans=1, embed_dim=64, depth=3, num_heads=4, num_classes=10,
        attn_layer=DCAttention.with_options(rank=2),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(EPOCHS):
        model.train()
        for x, y in DataLoader(train, batch_size=64, shuffle=True):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            right = sum((model(x).argmax(1) == y).sum().item() for x, y in DataLoader(val, batch_size=512))
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, accuracy {100 * right / len(val):.1f} %")
    return right / len(val)


if __name__ == "__main__":
    main()
