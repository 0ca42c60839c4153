"""What a job can touch: one module a resource, each with snapshot, restore and facts."""
