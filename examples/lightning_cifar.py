"""A small ResNet on CIFAR-10 inside Lightning: python examples/lightning_cifar.py --data FOLDER"""

import argparse
from pathlib import Path

import lightning
import torch
from data import cifar10
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from halfstep.adapters.lightning import Halfstep

parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path, required=True, help="a folder with cifar-10-batches-py, or an .npz file")
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--batch", type=int, default=128)
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--level", default="O2")
parser.add_argument("--out", type=Path, default=Path("lightning_cifar"), help="where logs and checkpoints go")
parser.add_argument("--resume", type=Path, help="a checkpoint of an earlier run, to go on from")
args = parser.parse_args()


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x):
        return torch.relu(x + self.body(x))


def stage(inside, outside):
    conv = nn.Conv2d(inside, outside, 3, stride=2, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outside), nn.ReLU(), Residual(outside))


class Classifier(lightning.LightningModule):
    def __init__(self, width, steps):
        super().__init__()
        self.save_hyperparameters()
        stages = stage(3, width), stage(width, 2 * width), stage(2 * width, 4 * width)
        self.net = nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(4 * width, 10)

    def forward(self, images):
        return self.head(self.net(images))

    def training_step(self, batch, index):
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, index):
        images, labels = batch
        self.log("accuracy", (self(images).argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=self.hparams.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


lightning.seed_everything(0)
train_images, train_labels, test_images, test_labels = cifar10(args.data)
training = DataLoader(TensorDataset(train_images, train_labels), batch_size=args.batch, shuffle=True, drop_last=True)
validation = DataLoader(TensorDataset(test_images, test_labels), batch_size=256)
trainer = lightning.Trainer(
    max_steps=args.steps,
    plugins=[Halfstep(args.level)],  # in place of precision=
    gradient_clip_val=1.0,
    callbacks=[ModelCheckpoint(save_last=True), LearningRateMonitor()],
    log_every_n_steps=1,
    default_root_dir=args.out,
)
model = Classifier(args.width, args.steps)
trainer.fit(model, training, validation, ckpt_path=args.resume)
loss = trainer.callback_metrics["loss"]
(result,) = trainer.validate(model, validation)
print(f"{result['accuracy']:.1%} of the test images right, loss {loss:.4f}")
