"""General helpers: files, JSON fields, Markdown tables, devices, signals, lazy imports."""
