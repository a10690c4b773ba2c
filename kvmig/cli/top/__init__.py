"""`kvmig top`: what runs, in a terminal."""
