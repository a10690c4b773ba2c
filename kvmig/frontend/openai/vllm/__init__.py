"""vLLM's own OpenAI application on kvmig's router."""
