"""Training code shared by dcvision, dclm and dcvl: checkpoints and resume, data order, strategies, command line."""
