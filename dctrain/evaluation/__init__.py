"""What the evaluations of both trainers share: results that are kept as they come, ranks, the table."""
