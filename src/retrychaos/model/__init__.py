"""Values without I/O: steps, ledgers, plans, reports, errors. Imports nothing else of ours."""
