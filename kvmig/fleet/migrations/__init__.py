"""The steps by which a fleet's database came to its tables; Alembic runs them."""
