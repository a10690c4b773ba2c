"""An explicit-state model checker over the machines that run: `python -m kvmig_tools.check`.

See docs/migration.md, "What is proven".
"""
