import argparse
import os
import random

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from parts import Discriminator, Generator, checksum, images, weights_init

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

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, world_size, local_rank = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
device = torch.device(f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)

os.makedirs(opt.outf, exist_ok=True)
random.seed(opt.manualSeed + rank)  # other noise on each rank
torch.manual_seed(opt.manualSeed + rank)

dataset = images()
sampler = DistributedSampler(dataset, seed=0)
dataloader = DataLoader(dataset, batch_size=opt.batchSize, sampler=sampler)

netG = Generator(opt.nz, opt.ngf).to(device)
netG.apply(weights_init)
if opt.netG:
    netG.load_state_dict(torch.load(opt.netG, map_location=device))
netG = DistributedDataParallel(netG, device_ids=[local_rank] if device.type == "cuda" else None)
netD = Discriminator(opt.ndf).to(device)
netD.apply(weights_init)
if opt.netD:
    netD.load_state_dict(torch.load(opt.netD, map_location=device))
netD = DistributedDataParallel(netD, device_ids=[local_rank] if device.type == "cuda" else None)

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
            means = torch.tensor(list(losses.values()), dtype=torch.float64, device=device)
            dist.all_reduce(means)
            means /= world_size
            losses = dict(zip(losses, means.tolist()))
            if rank == 0:
                print(f"result epoch {epoch} step {i}", *(f"{name} {loss!r}" for name, loss in losses.items()))

    if rank == 0:
        with torch.no_grad():
            fake = netG.module(fixed_noise)  # the other ranks do not call netG, so DDP must not send its buffers
        print(f"result epoch {epoch} samples {fake.double().mean().item()!r}")
        torch.save(fake, f"{opt.outf}/fake_samples_epoch_{epoch:03d}.pt")
        torch.save(netG.module.state_dict(), f"{opt.outf}/netG_epoch_{epoch}.pth")
        torch.save(netD.module.state_dict(), f"{opt.outf}/netD_epoch_{epoch}.pth")

if rank == 0:
    print(f"result parameters {checksum(netG.module, netD.module)}")
dist.destroy_process_group()
