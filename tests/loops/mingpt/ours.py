from dataclasses import dataclass

import torch
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
print = on_rank(0)(print)


@dataclass
class TrainerConfig:
    max_epochs: int = 4
    batch_size: int = 32
    data_loader_workers: int = 1
    grad_norm_clip: float = 1.0
    snapshot_path: str = "snapshot.pt"
    save_every: int = 2
    use_amp: bool = False


class Trainer:
    def __init__(self, config, model, optimizer, train_dataset, test_dataset=None):
        self.config = config
        self.device = initialize_ddp().device
        self.train_loader = self._prepare_dataloader(train_dataset, train=True)
        self.test_loader = self._prepare_dataloader(test_dataset, train=False) if test_dataset else None
        self.epochs_run = 0
        self.model = model
        self.optimizer = optimizer
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.use_amp)
        self._load_snapshot()

    def _prepare_dataloader(self, dataset: Dataset, train: bool):
        loader = DataLoader(
            dataset,
            batch_size=self.config.batch_size,
            pin_memory=self.device.type == "cuda",
            num_workers=self.config.data_loader_workers,
            sampler=EpochShuffle(len(dataset), seed=0) if train else None,
        )
        return prepare_dataloader(loader, pad=train, seed=0)  # with a seed, torch's random numbers stay as they are

    def _load_snapshot(self):
        try:
            snapshot = load_checkpoint(self.config.snapshot_path, model=self.model, optimizer=self.optimizer)
        except FileNotFoundError:
            print("Snapshot not found. Training model from scratch")
            return
        self.epochs_run = snapshot["finished_epoch"]
        print(f"Resuming training from snapshot at Epoch {self.epochs_run}")

    def _save_snapshot(self, epoch):
        save_checkpoint(self.config.snapshot_path, model=self.model, optimizer=self.optimizer, finished_epoch=epoch)
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
            test_loss = reduce_metrics({"loss": loss_sum / samples}, weight=samples)["loss"]
            print(f"result Epoch {epoch} | Test Loss {test_loss!r}")

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
    model = prepare_model(GPT(GPTConfig(vocab_size=dataset.vocab_size, block_size=dataset.block_size)))
    optimizer = create_optimizer(model, OptimizerConfig())
    return model, optimizer, train_set, test_set


def main():
    seed_everything(SEED)
    trainer = Trainer(TrainerConfig(), *get_train_objs())
    trainer.train()
    print("result parameters", checksum(unwrap_model(trainer.model)))


if __name__ == "__main__":
    main()
