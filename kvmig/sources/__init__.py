"""Models by name: where their files come from, how they are fetched, and the folder they are in."""
