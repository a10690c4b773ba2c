"""`kvmig ...`: the command line."""
