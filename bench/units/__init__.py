"""Several models share the KV cache, and the device, of one host: what that is worth and costs."""
