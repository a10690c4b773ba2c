"""The vLLM adapter: the only folder that knows vLLM's internals (see `version`)."""
