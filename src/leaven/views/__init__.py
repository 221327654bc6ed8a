"""What a person looks at: tables in the terminal, one self-contained page."""
