"""The ground floor: values that every other floor shares. Imports nothing of ours."""
