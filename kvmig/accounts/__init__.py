"""Accounts: who may use which model, and what was used."""
