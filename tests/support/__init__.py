"""Helpers that test files share: tiny models, runs, folders, servers and reference implementations."""
