"""How a chunk's bytes get from one llumlet to the other, behind one port (`base`)."""
