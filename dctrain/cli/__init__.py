"""Command line of all trainers: entry points, Lightning's subcommands, and subcommands that are plain functions."""
