"""What a run shows. ``docs/watching.md`` describes every tag."""
