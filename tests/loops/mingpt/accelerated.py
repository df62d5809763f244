from dataclasses import asdict, dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from parts import (
    GPT,
    CharDataset,
    DataConfig,
    EpochShuffle,
    GPTConfig,
    OptimizerConfig,
    checksum,
    create_optimizer,
)
from torch.utils.data import DataLoader, Dataset, random_split

SEED = 42


@dataclass
class TrainerConfig:
    max_epochs: int = 4
    batch_size: int = 32
    data_loader_workers: int = 1
    grad_norm_clip: float = 1.0
    snapshot_path: str = "snapshot.pt"
    save_every: int = 2
    use_amp: bool = False


@dataclass
class Snapshot:
    model_state: dict[str, torch.Tensor]
    optimizer_state: dict[str, Any]
    finished_epoch: int


class Trainer:
    def __init__(self, config, accelerator, model, optimizer, train_dataset, test_dataset=None):
        self.config = config
        self.accelerator = accelerator
        self.device = accelerator.device
        self.train_loader = self._prepare_dataloader(train_dataset, train=True)
        self.test_loader = self._prepare_dataloader(test_dataset, train=False) if test_dataset else None
        self.epochs_run = 0
        self.model = model
        self.optimizer = optimizer
        self._load_snapshot()
        self.model, self.optimizer, self.train_loader, self.test_loader = accelerator.prepare(
            self.model, self.optimizer, self.train_loader, self.test_loader
        )

    def _prepare_dataloader(self, dataset: Dataset, train: bool):
        return DataLoader(
            dataset,
            batch_size=self.config.batch_size,
            pin_memory=self.device.type == "cuda",
            num_workers=self.config.data_loader_workers,
            sampler=EpochShuffle(len(dataset), seed=0) if train else None,
        )

    def _load_snapshot(self):
        try:
            snapshot = Snapshot(**torch.load(self.config.snapshot_path, map_location="cpu"))
        except FileNotFoundError:
            self.accelerator.print("Snapshot not found. Training model from scratch")
            return
        self.model.load_state_dict(snapshot.model_state)
        self.optimizer.load_state_dict(snapshot.optimizer_state)
        self.epochs_run = snapshot.finished_epoch
        self.accelerator.print(f"Resuming training from snapshot at Epoch {self.epochs_run}")

    def _save_snapshot(self, epoch):
        model = self.accelerator.unwrap_model(self.model)
        snapshot = Snapshot(model.state_dict(), self.optimizer.state_dict(), epoch)
        self.accelerator.save(asdict(snapshot), self.config.snapshot_path)
        self.accelerator.print(f"Snapshot saved at epoch {epoch}")

    def _run_batch(self, source, targets, train: bool = True) -> torch.Tensor:
        with torch.set_grad_enabled(train), self.accelerator.autocast():
            _, loss = self.model(source, targets)
        if train:
            self.optimizer.zero_grad(set_to_none=True)
            self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
            self.optimizer.step()
        return loss.detach()

    def _run_epoch(self, epoch: int, dataloader: DataLoader, train: bool = True):
        self.model.train(train)
        if train:
            dataloader.set_epoch(epoch)
        loss_sum, samples = 0.0, 0
        for iter, (source, targets) in enumerate(dataloader):
            batch_loss = self._run_batch(source, targets, train)
            if train and iter % 5 == 0:
                self.accelerator.print(f"result Epoch {epoch} | Iter {iter} | Train Loss {batch_loss.item()!r}")
            if not train:
                losses = self.accelerator.gather_for_metrics(batch_loss.repeat(len(source)))
                loss_sum += losses.double().sum().item()
                samples += len(losses)
        if not train:
            self.accelerator.print(f"result Epoch {epoch} | Test Loss {loss_sum / samples!r}")

    def train(self):
        for epoch in range(self.epochs_run + 1, self.config.max_epochs + 1):
            self._run_epoch(epoch, self.train_loader, train=True)
            if epoch % self.config.save_every == 0:
                self._save_snapshot(epoch)
            if self.test_loader:
                self._run_epoch(epoch, self.test_loader, train=False)


def get_train_objs():
    config = DataConfig()
    dataset = CharDataset(config)
    train_len = int(len(dataset) * config.train_split)
    split = torch.Generator().manual_seed(SEED)
    train_set, test_set = random_split(dataset, [train_len, len(dataset) - train_len], generator=split)
    model = GPT(GPTConfig(vocab_size=dataset.vocab_size, block_size=dataset.block_size))
    optimizer = create_optimizer(model, OptimizerConfig())
    return model, optimizer, train_set, test_set


def main():
    config = TrainerConfig()
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision="fp16" if config.use_amp else "no")
    set_seed(SEED, device_specific=True)
    trainer = Trainer(config, accelerator, *get_train_objs())
    trainer.train()
    accelerator.print("result parameters", checksum(accelerator.unwrap_model(trainer.model)))
    accelerator.end_training()


if __name__ == "__main__":
    main()
