"""A DCGAN: two networks, two optimizers and three losses, all at the level of the module as such scripts are."""

import argparse

import torch
from apex import amp
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("out")
parser.add_argument("--fp32", action="store_true")
parser.add_argument("--opt-level", default="O1")
opt = parser.parse_args()
torch.manual_seed(0)
nz, ngf, ndf, nc = 6, 4, 4, 1


def weights_init(m):
    classname = m.__class__.__name__
    if classname.find("Conv") != -1:
        m.weight.data.normal_(0.0, 0.02)
    elif classname.find("BatchNorm") != -1:
        m.weight.data.normal_(1.0, 0.02)
        m.bias.data.fill_(0)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf, 4, 1, 0, bias=False), nn.BatchNorm2d(ngf), nn.ReLU(True),
            nn.ConvTranspose2d(ngf, nc, 4, 2, 1, bias=False), nn.Tanh(),
        )  # fmt: skip

    def forward(self, input):
        return self.main(input)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(nc, ndf, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf, ndf, 3, 1, 1, bias=False), nn.BatchNorm2d(ndf), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf, 1, 4, 1, 0, bias=False),
        )  # fmt: skip

    def forward(self, input):
        return self.main(input).view(-1, 1).squeeze(1)


netG, netD = Generator(), Discriminator()
netG.apply(weights_init)
netD.apply(weights_init)
criterion = nn.BCEWithLogitsLoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
[netD, netG], [optimizerD, optimizerG] = amp.initialize(
    [netD, netG], [optimizerD, optimizerG], opt_level=opt.opt_level, num_losses=3, enabled=not opt.fp32
)
real, losses = torch.randn(8, nc, 8, 8).clamp(-1, 1), []
for _ in range(6):
    netD.zero_grad()
    output = netD(real)
    errD_real = criterion(output, torch.ones_like(output))
    with amp.scale_loss(errD_real, optimizerD, loss_id=0) as errD_real_scaled:
        errD_real_scaled.backward()
    fake = netG(torch.randn(8, nz, 1, 1))
    output = netD(fake.detach())
    errD_fake = criterion(output, torch.zeros_like(output))
    with amp.scale_loss(errD_fake, optimizerD, loss_id=1) as errD_fake_scaled:
        errD_fake_scaled.backward()
    errD = errD_real + errD_fake
    optimizerD.step()
    netG.zero_grad()
    output = netD(fake)
    errG = criterion(output, torch.ones_like(output))
    with amp.scale_loss(errG, optimizerG, loss_id=2) as errG_scaled:
        errG_scaled.backward()
    optimizerG.step()
    losses.append(errD.item())
torch.save({"losses": losses, "weights": netD.state_dict() | netG.state_dict()}, opt.out)
