"""The model, the data, the checkpoints and the metrics of a training loop that runs on every rank."""
