"""A running cluster of real engines under faults, with every answer checked."""
