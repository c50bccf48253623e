"""Attention on packed storage: ``naive`` is vectorised pure torch, for every device, and the ground truth."""
