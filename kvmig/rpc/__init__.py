"""How kvmig's processes talk: sockets, framing, and the messages that all have."""
