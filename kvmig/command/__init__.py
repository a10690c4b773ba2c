"""Servers of other engines as models of a fleet: started by a user's command, and relayed to."""
