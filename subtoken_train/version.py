"""The package's version, in the one place that the build, the adapters and the reports read."""

__version__ = "0.3.0"
