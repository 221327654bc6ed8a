"""Documents as a person reads them in a terminal: tables, facts under labels, and one live screen."""
