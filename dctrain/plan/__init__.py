"""`plan`: memory, FLOPs, time and cost of a run, computed without a device."""
