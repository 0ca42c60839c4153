"""Which plan to run next, and what a run means."""
