"""`python -m kvmig.cli.demo`: watch a text move between instances while it streams."""
