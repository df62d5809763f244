import argparse
import os

import torch
from torch import nn, optim
from torch.utils.data import DataLoader

from nn_parallel import (
    initialize_ddp,
    load_checkpoint,
    on_rank,
    prepare_dataloader,
    prepare_model,
    reduce_metrics,
    save_checkpoint,
    seed_everything,
    unwrap_model,
)
from parts import Discriminator, EpochShuffle, Generator, checksum, images, weights_init

parser = argparse.ArgumentParser()
parser.add_argument("--batchSize", type=int, default=16, help="input batch size")
parser.add_argument("--nz", type=int, default=10, help="size of the latent z vector")
parser.add_argument("--ngf", type=int, default=8)
parser.add_argument("--ndf", type=int, default=8)
parser.add_argument("--niter", type=int, default=3, help="number of epochs to train for")
parser.add_argument("--lr", type=float, default=0.0002, help="learning rate")
parser.add_argument("--beta1", type=float, default=0.5, help="beta1 for adam")
parser.add_argument("--netG", default="", help="path to netG (to continue training)")
parser.add_argument("--netD", default="", help="path to netD (to continue training)")
parser.add_argument("--outf", default=".", help="folder for samples and model checkpoints")
parser.add_argument("--manualSeed", type=int, default=0, help="manual seed")
opt = parser.parse_args()

os.makedirs(opt.outf, exist_ok=True)
device = initialize_ddp().device
print, save = on_rank(0)(print), on_rank(0)(torch.save)
seed_everything(opt.manualSeed)

dataset = images()
sampler = EpochShuffle(len(dataset), seed=0)
dataloader = prepare_dataloader(DataLoader(dataset, batch_size=opt.batchSize, sampler=sampler), seed=0)

netG = Generator(opt.nz, opt.ngf).to(device)
netG.apply(weights_init)
if opt.netG:
    load_checkpoint(opt.netG, netG=netG)
netG = prepare_model(netG)
netD = Discriminator(opt.ndf).to(device)
netD.apply(weights_init)
if opt.netD:
    load_checkpoint(opt.netD, netD=netD)
netD = prepare_model(netD)

criterion = nn.BCELoss()
fixed_noise = torch.randn(opt.batchSize, opt.nz, 1, 1, device=device)
real_label, fake_label = 1.0, 0.0
optimizerD = optim.Adam(netD.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))

for epoch in range(opt.niter):
    sampler.set_epoch(epoch)
    for i, (real,) in enumerate(dataloader):
        # Update D: maximize log(D(x)) + log(1 - D(G(z))).
        netD.zero_grad()
        real = real.to(device)
        batch_size = real.size(0)
        label = torch.full((batch_size,), real_label, device=device)
        output = netD(real)
        errD_real = criterion(output, label)
        errD_real.backward()
        D_x = output.mean().item()

        noise = torch.randn(batch_size, opt.nz, 1, 1, device=device)
        fake = netG(noise)
        label.fill_(fake_label)
        output = netD(fake.detach())
        errD_fake = criterion(output, label)
        errD_fake.backward()
        D_G_z1 = output.mean().item()
        errD = errD_real + errD_fake
        optimizerD.step()

        # Update G: maximize log(D(G(z))).
        netG.zero_grad()
        label.fill_(real_label)  # fake labels are real for the generator cost
        output = netD(fake)
        errG = criterion(output, label)
        errG.backward()
        D_G_z2 = output.mean().item()
        optimizerG.step()

        if i % 5 == 0:
            losses = {"loss_D": errD.item(), "loss_G": errG.item(), "D_x": D_x, "D_G_z1": D_G_z1, "D_G_z2": D_G_z2}
            losses = reduce_metrics(losses)
            print(f"result epoch {epoch} step {i}", *(f"{name} {loss!r}" for name, loss in losses.items()))

    with torch.no_grad():
        fake = netG(fixed_noise)
    print(f"result epoch {epoch} samples {fake.double().mean().item()!r}")
    save(fake, f"{opt.outf}/fake_samples_epoch_{epoch:03d}.pt")
    save_checkpoint(f"{opt.outf}/netG_epoch_{epoch}.pth", netG=netG)
    save_checkpoint(f"{opt.outf}/netD_epoch_{epoch}.pth", netD=netD)

print(f"result parameters {checksum(unwrap_model(netG), unwrap_model(netD))}")
