"""Answering questions under compression: tasks, metrics, runs with their records, intervals, reports and drawings."""
