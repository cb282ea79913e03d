"""A GAN: two models, two optimizers, the judge's weights clipped through .data, as in WGAN."""

import sys

import torch
import torch.nn as nn

torch.manual_seed(0)

generator = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 8))
discriminator = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
optimizer_G = torch.optim.RMSprop(generator.parameters(), lr=5e-3)
optimizer_D = torch.optim.RMSprop(discriminator.parameters(), lr=5e-3)

losses = []
for i in range(6):
    real = torch.randn(8, 8) + 1
    optimizer_D.zero_grad()
    fake = generator(torch.randn(8, 4)).detach()
    loss_D = -torch.mean(discriminator(real)) + torch.mean(discriminator(fake))
    loss_D.backward()
    optimizer_D.step()
    for p in discriminator.parameters():
        p.data.clamp_(-0.1, 0.1)
    losses.append(loss_D.item())
    if i % 2 == 0:
        optimizer_G.zero_grad()
        loss_G = -torch.mean(discriminator(generator(torch.randn(8, 4))))
        loss_G.backward()
        optimizer_G.step()
        losses.append(loss_G.item())

torch.save({"losses": losses, "model": generator.state_dict(), "judge": discriminator.state_dict()}, sys.argv[1])
