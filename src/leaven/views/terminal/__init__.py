"""Terminal screens of documents: tables, labelled facts, and one live screen."""
