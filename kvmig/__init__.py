"""kvmig moves running LLM requests between engine instances while they decode."""

__version__ = "0.1.0"
