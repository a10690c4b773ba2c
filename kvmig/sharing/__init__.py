"""Models of one host share KV cache and steps: their agent, and its members."""
