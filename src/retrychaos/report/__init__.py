"""Reports for people and machines: all read the same Report, none computes."""
