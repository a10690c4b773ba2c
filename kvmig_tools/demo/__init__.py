"""`python -m kvmig_tools.demo`: watch a text move between instances while it streams."""
