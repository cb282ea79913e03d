"""A DCGAN on Fashion-MNIST in halfstep's own lines: two models, two optimizers, three losses with a scale each.

python examples/halfstep_dcgan.py --data FOLDER
"""

import argparse
from pathlib import Path

import torch
from data import fashion_mnist
from torch import nn

import halfstep

parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path, required=True, help="the folder with Fashion-MNIST's IDX files")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--level", default="O1")
parser.add_argument("--width", type=int, default=16)
args = parser.parse_args()

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
images, _ = fashion_mnist(args.data)
width, noise_size, batch = args.width, 32, 32


def weights_init(m):
    if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(m.weight, 0.0, 0.02)


netG = nn.Sequential(
    nn.ConvTranspose2d(noise_size, 2 * width, 7),
    nn.BatchNorm2d(2 * width),
    nn.ReLU(),
    nn.ConvTranspose2d(2 * width, width, 4, 2, 1),
    nn.BatchNorm2d(width),
    nn.ReLU(),
    nn.ConvTranspose2d(width, 1, 4, 2, 1),
    nn.Tanh(),
).to(device)
netD = nn.Sequential(
    nn.Conv2d(1, width, 4, 2, 1),
    nn.LeakyReLU(0.2),
    nn.Conv2d(width, 2 * width, 4, 2, 1),
    nn.BatchNorm2d(2 * width),
    nn.LeakyReLU(0.2),
    nn.Conv2d(2 * width, 1, 7),
    nn.Flatten(0),
).to(device)
netG.apply(weights_init)
netD.apply(weights_init)

criterion = nn.BCEWithLogitsLoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
session = halfstep.initialize([netD, netG], [optimizerD, optimizerG], args.level)

for step in range(args.steps):
    real = images[torch.randint(len(images), (batch,))].to(device)
    noise = torch.randn(batch, noise_size, 1, 1, device=device)

    netD.zero_grad()
    errD_real = criterion(netD(real), torch.ones(batch, device=device))
    session.backward(errD_real, loss_id=0)
    fake = netG(noise)
    errD_fake = criterion(netD(fake.detach()), torch.zeros(batch, device=device))
    session.backward(errD_fake, loss_id=1)
    session.step(optimizerD)

    netG.zero_grad()
    errG = criterion(netD(fake), torch.ones(batch, device=device))
    session.backward(errG, loss_id=2)
    session.step(optimizerG)

print(f"Loss_D {errD_real.item() + errD_fake.item():.4f} Loss_G {errG.item():.4f}")
