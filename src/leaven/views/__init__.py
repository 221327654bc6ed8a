"""Views of documents: terminal screens and self-contained HTML pages."""
