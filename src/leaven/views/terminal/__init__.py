"""Show documents in the terminal: tables, labelled lines, and a live screen."""
