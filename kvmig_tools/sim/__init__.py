"""The real control plane on modelled engines, in virtual time."""
