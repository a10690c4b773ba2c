"""Engines behind one port (`kvmig.engines.base`); each adapter has a folder of its own."""
