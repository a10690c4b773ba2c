"""A mirror of the hub for a cluster: it speaks the hub's protocol, and downloads each file once."""
