"""The OpenAI API on a `FrontendRouter`, for each kind of engine."""
