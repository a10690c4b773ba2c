"""Many models: the catalogue, what runs, who may use it."""
