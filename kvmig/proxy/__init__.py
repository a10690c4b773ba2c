"""The proxy of a fleet: clients reach all models through it."""
