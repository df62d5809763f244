from dataclasses import asdict, dataclass
from typing import Any

import torch
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
    def __init__(self, config, model, optimizer, train_dataset, test_dataset=None):
        self.config = config
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.train_loader = self._prepare_dataloader(train_dataset, train=True)
        self.test_loader = self._prepare_dataloader(test_dataset, train=False) if test_dataset else None
        self.epochs_run = 0
        self.model = model.to(self.device)
        self.optimizer = optimizer
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.use_amp)
        self._load_snapshot()

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
            print("Snapshot not found. Training model from scratch")
            return
        self.model.load_state_dict(snapshot.model_state)
        self.optimizer.load_state_dict(snapshot.optimizer_state)
        self.epochs_run = snapshot.finished_epoch
        print(f"Resuming training from snapshot at Epoch {self.epochs_run}")

    def _save_snapshot(self, epoch):
        snapshot = Snapshot(self.model.state_dict(), self.optimizer.state_dict(), epoch)
        torch.save(asdict(snapshot), self.config.snapshot_path)
        print(f"Snapshot saved at epoch {epoch}")

    def _run_batch(self, source, targets, train: bool = True) -> float:
        amp = torch.autocast(self.device.type, torch.float16, enabled=self.config.use_amp)
        with torch.set_grad_enabled(train), amp:
            _, loss = self.model(source, targets)
        if train:
            self.optimizer.zero_grad(set_to_none=True)
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return loss.item()

    def _run_epoch(self, epoch: int, dataloader: DataLoader, train: bool = True):
        self.model.train(train)
        if train:
            dataloader.sampler.set_epoch(epoch)
        loss_sum, samples = 0.0, 0
        for iter, (source, targets) in enumerate(dataloader):
            source = source.to(self.device)
            targets = targets.to(self.device)
            batch_loss = self._run_batch(source, targets, train)
            loss_sum += batch_loss * len(source)
            samples += len(source)
            if train and iter % 5 == 0:
                print(f"result Epoch {epoch} | Iter {iter} | Train Loss {batch_loss!r}")
        if not train:
            print(f"result Epoch {epoch} | Test Loss {loss_sum / samples!r}")

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
    torch.manual_seed(SEED)
    trainer = Trainer(TrainerConfig(), *get_train_objs())
    trainer.train()
    print("result parameters", checksum(trainer.model))


if __name__ == "__main__":
    main()
