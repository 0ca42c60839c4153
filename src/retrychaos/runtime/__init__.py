"""One delivery under control: its clock, its randomness, its process identity, and the process it is forked into."""
