"""What a run shows: one callback per file. ``docs/watching.md`` describes every tag."""
