"""How long steps take on a share of a device, and what models hold there."""
