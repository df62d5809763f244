"""An existing training loop on every rank."""
