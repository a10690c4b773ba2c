"""Finds what another version of an engine changes under kvmig's adapter: `python -m
kvmig_tools.drift`.

Everything is read from sources; the engine is never imported. What is to be looked at, of which
engine, stands in a TOML file beside the adapter (`Contract`).
"""
