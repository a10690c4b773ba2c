"""The OpenAI API on a Router, for each kind of engine."""
