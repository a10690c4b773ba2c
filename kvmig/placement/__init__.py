"""Which models share which GPUs: MuxServe's placement (arXiv 2404.02015), and our search. Pure."""
