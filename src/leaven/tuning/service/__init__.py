"""Run a search: stores, leases, budgets, worker processes and the study folder."""
