"""A gallery of background jobs, each bad one beside its good twin. Start with README.md."""
