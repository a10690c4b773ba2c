"""Deciding what moves: a frozen view of the cluster, pure policies, scheduler, llumlet."""
