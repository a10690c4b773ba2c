"""Keys: who may use which model, and how much."""
