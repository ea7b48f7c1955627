"""What both trainers share: exact order and resume, checkpoints, stops, speed, the optimiser, the command line."""
