"""What trained towers are used for: one module for each command."""
