"""The LightningModule, its optimiser, callbacks and checkpoints."""
