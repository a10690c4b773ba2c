"""An explicit-state model checker over the machines that run: `python -m kvmig.check`.

See docs/migration.md, "What is proven".
"""
