"""Run a search: start its trials within a budget, store their results, and write the folder of the study."""
