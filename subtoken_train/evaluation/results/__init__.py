"""Results on disk: one folder per arm and task."""
