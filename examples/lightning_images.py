"""An image classifier on Fashion-MNIST inside Lightning: python examples/lightning_images.py --data FOLDER"""

import argparse
from pathlib import Path

import lightning
import torch
from data import fashion_mnist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from halfstep.adapters.lightning import Halfstep

parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path, required=True, help="the folder with Fashion-MNIST's IDX files")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--level", default="O2")
parser.add_argument("--out", type=Path, default=Path("lightning_images"), help="where logs and checkpoints go")
args = parser.parse_args()


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(32 * 14 * 14, 10))

    def forward(self, images):
        return self.head(self.body(images))

    def training_step(self, batch, index):
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


torch.manual_seed(0)
loader = DataLoader(TensorDataset(*fashion_mnist(args.data)), batch_size=64, shuffle=True)
trainer = lightning.Trainer(
    max_steps=args.steps,
    plugins=[Halfstep(args.level)],  # in place of precision=
    gradient_clip_val=1.0,
    log_every_n_steps=1,
    default_root_dir=args.out,
)
trainer.fit(Classifier(), loader)
print(f"loss {trainer.callback_metrics['loss'].item():.4f}")
