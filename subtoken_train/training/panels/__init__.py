"""Callbacks that show how a run goes. ``docs/watching.md`` describes every tag."""
