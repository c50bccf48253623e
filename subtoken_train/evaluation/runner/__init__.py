"""Runs a grid of arms and tasks, resumably, on one or many devices."""
