"""MuxServe's evaluation (arXiv 2404.02015) in the simulator, beside its published figures."""
