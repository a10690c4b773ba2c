"""Command-line entry points of the processes."""
