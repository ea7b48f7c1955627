"""Parameters that ranks hold parts of: which parts, how they are computed with, and how they are kept on disk."""
