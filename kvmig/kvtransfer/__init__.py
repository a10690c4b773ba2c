"""Moving one request: the handshake's two machines, the stages, the transports, the session."""
