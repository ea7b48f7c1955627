"""Commands for trained models: one module per command."""
