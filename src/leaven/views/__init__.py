"""Show documents as terminal screens and as self-contained HTML pages."""
